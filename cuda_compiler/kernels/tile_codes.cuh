// Copies tiles of an operand that holds codes of a byte: each becomes a number on its way, by the generated number_of.
template <int EXTENT, bool ALONG_K>
struct CodeCopier : OperandCopier<EXTENT, ALONG_K, false, code_t> {
    using Base = OperandCopier<EXTENT, ALONG_K, false, code_t>;
    int first; // row or column of this thread's first chunk
    Codes codes;

    CodeCopier() = default;

    __device__ __forceinline__ CodeCopier(
        const code_t* operand, int base, int limit, int stride_along, int stride_k, int first_tile, int common,
        const Codes& codes)
        : Base(operand, base, limit, stride_along, stride_k, first_tile, common), codes(codes)
    {
        first = base + int(ALONG_K ? copy_thread() / Base::CHUNKS : copy_thread() % Base::CHUNKS * CHUNK);
    }

    __device__ __forceinline__ void copy(unsigned char* tile, const Params& p)
    {
        #pragma unroll
        for (int round = 0; round < Base::ROUNDS; ++round) {
            int line = round * Base::STEP;
            bool valid = ALONG_K ? line < this->inside && this->depth < this->common
                                 : this->inside && this->depth + line < this->common;
            Pack<tile_t, CHUNK> numbers;
            Pack<code_t, CHUNK> part = {};
            if (valid) {
                part = load_pack<CHUNK>(this->source + line * this->line_stride);
            }
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                int row = ALONG_K ? first + line : first + u;
                numbers[u] = tile_t(valid ? number_of(int(part[u]), row, codes, p) : 0.0f);
            }
            store_pack(reinterpret_cast<tile_t*>(tile + this->target + line * Base::CHUNKS * 16), numbers);
        }
        this->source += this->tile_stride;
        this->depth += TILE_K;
    }
};
