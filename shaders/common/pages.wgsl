// Where the rows of keys and values begin. A variant with PAGED = 1 reads them from pools of pages; the binding
// table lists the pages of each batch in order, and then the values of the score mod if VALUES = 3.

@if(max(PAGED, VALUES / 3u) == 1u) @binding var<storage, read> table: array<u32>;

// page_of returns which page of a batch holds a key of the call.
fn page_of(key: u32) -> u32 {
    if (p.page_bits == 32u) { return key / p.page; }
    return key >> (p.page_bits & 31u);
}

// $x_row returns where the row of key j of the chunk begins, in a head that begins at element at. For pools, at
// is where the head begins in the first page of the pool.
@each($x: k, v)
fn $x_row(at: u32, batch: u32, j: u32) -> u32 {
    var row = at;
    @if(PAGED == 0u) {
        row = row + j * p.$x.s;
    } @else {
        let key = p.key0 + j;
        let n = page_of(key);
        row = row + table[p.table_at + batch * p.pages + n] * p.$x.b + (key - n * p.page) * p.$x.s;
    }
    return row;
}
