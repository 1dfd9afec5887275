// The numbers of a matrix in packed codes, in memory: OCTETS times eight a thread, of which neighbouring threads have
// neighbours. Nothing before this grid writes the codes or what belongs to them, so that they are on their way before it has
// finished. Grid: OCTETS times 256 octets in x. Block: 256.
constexpr int OCTETS = 4, WORDS = BITS / 4, ROW_OCTETS = COMMON / 8;

// An octet of codes and what belongs to it, as it lies in memory.
struct Octet {
    Pack<uint, WORDS> words;
    scale_t scale;
    zero_t zero;
    bias_t bias;
    int group;

    __device__ __forceinline__ void load(const uint8* matrix, const Groups& b, int index, const Params& p)
    {
        int row = index / ROW_OCTETS, octet = index % ROW_OCTETS;
        words = load_pack<WORDS>(reinterpret_cast<const uint*>(matrix + (long long)row * p.matrix_row + octet * BITS));
        group = octet * 8 / GROUP;
        load_belonging(scale, zero, bias, b, row_of_scales(row, p), group, p);
    }
    __device__ __forceinline__ Pack<uint, 4> numbers(const Codebook& codebook) const
    {
        uint word[WORDS];
        #pragma unroll
        for (int index = 0; index < WORDS; ++index) {
            word[index] = words[index];
        }
        uint made[4];
        octet_in_order(made, word, 0, zero_pair(ZEROS ? zero_of_group(zero, group) : float(ZERO)), codebook);
        Pack<uint, 4> result;
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            result[pair] = scaled_pair(made[pair], scale, bias);
        }
        return result;
    }
};

extern "C" __global__ void __launch_bounds__(256) code_numbers(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    vector_t* out, const Params p)
{
    Codebook codebook;
    codebook.load(entries);
    int first = int(blockIdx.x) * (OCTETS * 256) + int(threadIdx.x);
    Octet octet[OCTETS];
    #pragma unroll
    for (int turn = 0; turn < OCTETS; ++turn) {
        octet[turn].load(matrix, Groups{scales, zeros, biases}, min(first + turn * 256, p.octets - 1), p);
    }
    wait_for_previous_grid();
    #pragma unroll
    for (int turn = 0; turn < OCTETS; ++turn) {
        int index = first + turn * 256;
        if (index < p.octets) {
            store_pack(reinterpret_cast<uint*>(out) + (long long)index * 4, octet[turn].numbers(codebook));
        }
    }
}
