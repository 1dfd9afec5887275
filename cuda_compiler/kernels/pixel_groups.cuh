// Which results a thread of a kernel for images has: STORE_SIZE neighbouring channels of ALONG_Y x ALONG_X neighbouring
// pixels. Neighbouring threads have the same pixels.
struct PixelGroup {
    uint index;                // among all; those from p.groups on are none
    int channel, number, y, x; // of the first result: `number` is that of the image

    __device__ __forceinline__ explicit PixelGroup(const Params& p)
    {
        constexpr uint GROUPS_X = (OUT_WIDTH + ALONG_X - 1) / ALONG_X, GROUPS_Y = (OUT_HEIGHT + ALONG_Y - 1) / ALONG_Y;
        uint thread = (p.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * 128 + threadIdx.x;
        index = thread / PACKS;
        channel = int(thread % PACKS) * STORE_SIZE;
        number = int(index / GROUPS_X / GROUPS_Y);
        y = int(index / GROUPS_X % GROUPS_Y) * ALONG_Y;
        x = int(index % GROUPS_X) * ALONG_X;
    }

    // Whether the image has a pixel so far down and to the right, and which row of all results that is.
    __device__ __forceinline__ bool has(int down, int right) const
    {
        return y + down < OUT_HEIGHT && x + right < OUT_WIDTH;
    }
    __device__ __forceinline__ int row(int down, int right) const
    {
        return (number * OUT_HEIGHT + y + down) * OUT_WIDTH + x + right;
    }
};
