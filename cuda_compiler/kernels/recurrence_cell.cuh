// What a step of a recurrent layer does with its sums. CELL: 0 LSTM, 1 GRU, 2 tanh, 3 relu.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The new h of a unit. What is carried, c of an LSTM and h of a GRU, becomes its next value.
//   sums: by gate, what a step was given and the product with h; of a GRU's candidate the product alone.
//   apart, bias: what a GRU's candidate was given, and the bias inside of its reset.
__device__ __forceinline__ float next_state(const float (&sums)[GATES], float apart, float bias, float& carried)
{
#if CELL == 0
    carried = sigmoid(sums[1]) * carried + sigmoid(sums[0]) * tanhf(sums[2]);
    return sigmoid(sums[3]) * tanhf(carried);
#elif CELL == 1
    float update = sigmoid(sums[1]), candidate = tanhf(apart + sigmoid(sums[0]) * (sums[2] + bias));
    carried = (1.0f - update) * candidate + update * carried;
    return carried;
#elif CELL == 2
    return tanhf(sums[0]);
#else
    return sums[0] < 0.0f ? 0.0f : sums[0]; // NaN stays
#endif
}
