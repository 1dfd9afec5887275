// Makes 16-bit numbers of packed codes, for a product whose many tiles would make them again and again. A thread makes
// OCTETS octets of a group, every second of so many pairs: two neighbours then store whole sectors of memory, and all
// else is found once a thread. It asks for codes and scales while the launch ahead still runs: these are weights, which
// nobody writes. Where their place is free as well, blocks are done EARLY, and one waits for all, so that what is
// launched next has waited for the launch ahead too. Grid: threads in x, in blocks of 256.
constexpr int OCTET_WORDS = BITS / 4, ROW_OCTETS = COMMON / 8, APART = 2, ROW_THREADS = ROW_OCTETS / OCTETS;
static_assert(ROW_THREADS * OCTETS == ROW_OCTETS && ROW_THREADS % APART == 0, "whole spans of a group");
static_assert(GROUP >= COMMON || GROUP % (8 * APART * OCTETS) == 0, "one scale a thread");

extern "C" __global__ void __launch_bounds__(256) code_numbers(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    vector_t* out, const Params p)
{
    Codebook codebook;
    codebook.load(entries);
    uint index = blockIdx.x * 256 + threadIdx.x, within = index % ROW_THREADS, row = index / ROW_THREADS;
    uint first = within / APART * (APART * OCTETS) + within % APART, group = first * 8 / GROUP;
    Pack<uint, OCTET_WORDS> codes[OCTETS];
    scale_t scale{};
    zero_t zero{};
    bias_t bias{};
    if (row < p.outputs) {
        const uint* line = reinterpret_cast<const uint*>(matrix + (long long)row * p.matrix_row) + first * OCTET_WORDS;
        #pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            codes[octet] = load_pack<OCTET_WORDS>(line + octet * (APART * OCTET_WORDS));
        }
        load_belonging(scale, zero, bias, {scales, zeros, biases}, row_of_scales(row, p), group, p);
    }
    if (!EARLY) {
        wait_for_previous_grid();
    }
    if (row < p.outputs) {
        uint* place = reinterpret_cast<uint*>(out) + ((long long)row * ROW_OCTETS + first) * 4;
        #pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            Pack<uint, 4> numbers;
            octet_less_zero(numbers.at, codes[octet].at, 0, zero, group, codebook);
            #pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                numbers[pair] = exactly_scaled_pair(numbers[pair], scale, bias, IN_ORDER_UNIT);
            }
            store_pack(place + octet * (APART * 4), numbers);
        }
    }
    if (EARLY && blockIdx.x == gridDim.x - 1) {
        wait_for_previous_grid();
    }
}
