// The part of the visibility rule that differs between batches, which count from the first of the box.

// key_end returns end, or how many keys a batch has if that is less.
fn key_end(batch: u32, end: u32) -> i32 {
    @if(PACKED == 1u) return i32(min(end, of_sequence(batch, 3u)));
    @else {
        @if(LISTED == 1u) if ((p.flags & HAS_COUNTS) != 0u) { return i32(min(end, table[p.batch_at + batch])); }
        if ((p.flags & HAS_KLEN) == 0u) { return i32(end); }
        return min(i32(end), p.klen[batch / 4u][batch % 4u]);
    }
}

// offset_of returns what is added to the positions of the rows of a batch.
fn offset_of(batch: u32) -> i32 {
    @if(PACKED == 1u) return i32(of_sequence(batch, 4u));
    @else {
        if ((p.flags & HAS_OFFSETS) == 0u) { return 0; }
        return p.offsets[batch / 4u][batch % 4u];
    }
}
