"""The console command `npu`, and the sample models that it, the benchmarks and the tests share."""
