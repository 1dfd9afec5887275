// Makes 16-bit numbers of packed codes, for a product whose many tiles would make them again and again. A thread makes
// OCTETS octets, 256 apart, whose codes and scales it asks for while the launch ahead still runs: these are weights,
// which nobody writes. Where their place is free as well, blocks are done EARLY, and one waits for all, so that what is
// launched next has waited for the launch ahead too. Grid: octets in x, in blocks of 256 * OCTETS.
constexpr int OCTET_WORDS = BITS / 4, ROW_OCTETS = COMMON / 8;

extern "C" __global__ void __launch_bounds__(256) code_numbers(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    vector_t* out, const Params p)
{
    Groups belonging = {scales, zeros, biases};
    Codebook codebook;
    codebook.load(entries);
    Pack<uint, OCTET_WORDS> codes[OCTETS];
    scale_t scale[OCTETS];
    zero_t zero[OCTETS];
    bias_t bias[OCTETS];
    int first = int(blockIdx.x) * (256 * OCTETS) + int(threadIdx.x);
    #pragma unroll
    for (int which = 0; which < OCTETS; ++which) {
        int index = first + which * 256, row = index / ROW_OCTETS, octet = index % ROW_OCTETS;
        if (row < p.outputs) {
            const uint* line = reinterpret_cast<const uint*>(matrix + (long long)row * p.matrix_row);
            codes[which] = load_pack<OCTET_WORDS>(line + octet * OCTET_WORDS);
            int group = octet * 8 / GROUP;
            load_belonging(scale[which], zero[which], bias[which], belonging, row_of_scales(row, p), group, p);
        }
    }
    if (!EARLY) {
        wait_for_previous_grid();
    }
    #pragma unroll
    for (int which = 0; which < OCTETS; ++which) {
        int index = first + which * 256, row = index / ROW_OCTETS, group = index % ROW_OCTETS * 8 / GROUP;
        if (row < p.outputs) {
            Pack<uint, 4> numbers;
            octet_less_zero(numbers.at, codes[which].at, 0, zero[which], group, codebook);
            float factor = float(scale[which]), added = BIASES ? float(bias[which]) : 0.0f;
            #pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                numbers[pair] = exactly_scaled_pair(numbers[pair], factor, added);
            }
            store_pack(reinterpret_cast<uint*>(out) + index * 4, numbers);
        }
    }
    if (EARLY && blockIdx.x == gridDim.x - 1) {
        wait_for_previous_grid();
    }
}
