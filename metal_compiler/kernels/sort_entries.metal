// What is sorted: an entry for each element, its key ahead of its place in the row, so that no two are equal and all
// sorts are stable. NaN has the highest key, negative zero that of zero. DESCENDING turns keys around, not places.
#if WIDE
struct Entry {
    ulong key;
    uint place;
};
METAL_FUNC Entry entry_of(ulong key, int place)
{
    Entry entry;
    entry.key = DESCENDING ? ~key : key;
    entry.place = uint(place);
    return entry;
}
METAL_FUNC Entry last_entry() // behind all others, in place of none
{
    Entry entry;
    entry.key = ~0ul;
    entry.place = ~0u;
    return entry;
}
METAL_FUNC int place_of(Entry entry) { return int(entry.place); }
METAL_FUNC bool is_before(Entry a, Entry b) { return a.key < b.key || (a.key == b.key && a.place < b.place); }
METAL_FUNC ulong key_of(long element) { return ulong(element) ^ (1ul << 63); }
#else
typedef ulong Entry;
METAL_FUNC Entry entry_of(uint key, int place) { return ulong(DESCENDING ? ~key : key) << 32 | ulong(uint(place)); }
METAL_FUNC Entry last_entry() { return ~0ul; } // behind all others, in place of none
METAL_FUNC int place_of(Entry entry) { return int(uint(entry & 0xfffffffful)); }
METAL_FUNC bool is_before(Entry a, Entry b) { return a < b; }
METAL_FUNC uint key_of(int element) { return uint(element) ^ 0x80000000u; }
METAL_FUNC uint key_of(float element)
{
    uint bits = element == 0.0f ? 0u : as_type<uint>(element);
    return element != element ? ~0u : (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}
#endif
