// A ring of STAGES stages: parts of shared memory that some threads fill while others compute on those filled before.

// The barriers of the stages, BARRIERS_AT bytes behind the ring's shared address. A phase of `full` ends when a stage
// has what is copied there, one of `empty` when nobody reads that any more.
template <int BARRIERS_AT>
struct StageBarriers {
    uint base;

    __device__ __forceinline__ uint full(int stage) const { return base + BARRIERS_AT + stage * 16; }
    __device__ __forceinline__ uint empty(int stage) const { return full(stage) + 8; }

    // By the arrivals that fill a stage, and those that empty it.
    __device__ void make(int filling, int emptying) const
    {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(full(stage), filling);
            make_barrier(empty(stage), emptying);
        }
    }
};

// A stage of the ring, and the parity of its barriers' phase.
struct Turn {
    int stage = 0, parity = 0;

    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count)
    {
        stage += count;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};
