// Pieces of codes in shared memory, keys, then values, then the scales of both: how they come there, and their
// products.
constexpr int K_SCALES_AT = K_BYTES + PIECE * V_PITCH, V_SCALES_AT = K_SCALES_AT + PIECE * int(sizeof(k_scale_t));

// Starts copying 16 rows of SIZE bytes, of which `count` exist: the last one is copied again in place of others.
template <int SIZE, int PITCH, int STEP>
__device__ __forceinline__ void copy_bytes(unsigned char* tile, const unsigned char* source, int count = PIECE)
{
    constexpr int CHUNKS = SIZE / 16;
    #pragma unroll
    for (int first = 0; first < PIECE * CHUNKS; first += 32) {
        PieceChunk<CHUNKS> own(first);
        const unsigned char* from = source + own.template offset<STEP, 16>();
        if (!WHOLE_BLOCKS) {
            from = source + (long long)min(own.row(), count - 1) * STEP + own.chunk * 16;
        }
        copy_chunk(tile + own.template place<PITCH>(), from, true);
    }
}

__device__ __forceinline__ k_scale_t* key_scales_of(unsigned char* stage)
{
    return reinterpret_cast<k_scale_t*>(stage + K_SCALES_AT);
}
__device__ __forceinline__ v_scale_t* value_scales_of(unsigned char* stage)
{
    return reinterpret_cast<v_scale_t*>(stage + V_SCALES_AT);
}

__device__ __forceinline__ void multiply_piece_keys(Scores& score, const CodedQueries& query, unsigned char* stage)
{
    Keys keys;
    #pragma unroll
    for (int half_piece = 0; half_piece < 2; ++half_piece) {
        read_key(keys, half_piece, stage);
        keys.scale[half_piece] = float(key_scales_of(stage)[lane_place(half_piece * 2)]);
    }
    multiply_coded_keys(score, query, keys);
}

__device__ __forceinline__ void add_piece_values(Rows& rows, const Scores& weight, unsigned char* stage)
{
    Values values;
    #pragma unroll
    for (int which = 0; which < 4; ++which) {
        read_value(values, which, stage + K_BYTES);
    }
    #pragma unroll
    for (int half_piece = 0; half_piece < 2; ++half_piece) {
        values.scale[half_piece] = float(value_scales_of(stage)[lane_place(half_piece * 2)]);
    }
    add_coded_values(rows, weight, values);
}
