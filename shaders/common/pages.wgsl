// Where the rows of keys and values begin. A variant with PAGED = 1 reads them from pools of pages; the binding
// table lists the pages of each batch in order, and then the values of the score mod if VALUES = 3. With LISTED = 1 it
// has three words for each key instead: its position among all keys, and where its row begins in k and in v.
// The words of lists in device memory, and then the numbers of their keys, are those of lists.wgsl.
//
// With PACKED = 1 batches are sequences that begin anywhere in q, o and lse, and also in k and v unless PAGED = 1. There is no mask: its
// binding has the table, and then five words of each sequence: the first row, the number of rows, the first key, the number of keys
// and the offset.

@if(max(max(PAGED * (1u - PACKED), LISTED), VALUES / 3u) == 1u) @binding var<storage, read> table: array<u32>;

// page_of returns which page of a batch holds a key of the call.
fn page_of(key: u32) -> u32 {
    if (p.page_bits == 32u) { return key / p.page; }
    return key >> (p.page_bits & 31u);
}

// $x_row returns where the row of key j of the chunk begins, in a head that begins at element at. For pools, at
// is where the head begins in the first page of the pool.
@each($x $n: k 1u, v 2u)
fn $x_row(at: u32, batch: u32, j: u32) -> u32 {
    var row = at;
    @if(PAGED == 0u) {
        row = row + j * p.$x.s;
    } @else @if(LISTED == 1u) {
        row = row + table[p.table_at + (batch * p.pages + p.key0 + j) * 3u + $n];
    } @else {
        let key = p.key0 + j;
        let n = page_of(key);
        @if(PACKED == 0u) let page = table[p.table_at + batch * p.pages + n];
        @else let page = mask[p.table_at + batch * p.pages + n];
        row = row + page * p.$x.b + (key - n * p.page) * p.$x.s;
    }
    return row;
}

// of_sequence returns word n of a packed sequence.
@if(PACKED == 1u) fn of_sequence(batch: u32, n: u32) -> u32 { return mask[p.batch_at + batch * 5u + n]; }

// first_$x returns the first row, or key, of a batch in the box, or chunk, counted in the window of the operand.
@each($x $n: row 0u, key 2u)
fn first_$x(batch: u32) -> u32 {
    @if(PACKED == 0u) return 0u;
    @else return of_sequence(batch, $n) + p.$x0;
}

// $xs_of returns how many rows of the box, or keys of the chunk, a batch has.
@each($x $n: row 1u, key 3u)
fn $xs_of(batch: u32) -> u32 {
    @if(PACKED == 0u) return p.$xs;
    @else return min(max(of_sequence(batch, $n), p.$x0) - p.$x0, p.$xs);
}

// key_of returns the position of key j of the chunk, counted like j: other keys may precede a listed one.
fn key_of(batch: u32, j: u32) -> u32 {
    @if(LISTED == 0u) return j;
    @else return table[p.table_at + (batch * p.pages + p.key0 + j) * 3u] - p.key0;
}
