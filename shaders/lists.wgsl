// The table of listed keys, which common/pages.wgsl describes, from lists in device memory, a list a workgroup. A key counts
// where its row sees it: the others, and numbers that are no key, are left out. Each thread counts those of its stretch of
// the list and writes them after those of the threads before it. Words after the last key are 0.
//
// Words of ranges are for each list the keys that its row sees, from the first up to the second, and where in ranges the pages
// of its batch begin.
//
// Workgroup memory: 256 bytes.

@ranged struct ListsParams {
    list0: u32, // index in the call of the first list
    top: u32, // keys of a list
    page: u32, // keys of a page, 0 without pages
    counts_at: u32, // position in the table of the numbers of keys
    k_b: u32, // strides of k and v, batches of which are pages if there are any
    k_s, v_b, v_s: u32,
    keys: Strides,
}

@binding var<storage, read> keys, ranges: array<u32>;
@binding var<storage, read_write> table: array<u32>;
@binding var<uniform> p: ListsParams;

var<workgroup> counts: array<u32, 64>; // of a thread

@main(64) {
    let list = p.list0 + id;
    let lo = ranges[3u * list];
    let hi = ranges[3u * list + 1u];
    let each = (p.top + 63u) / 64u;
    let begin = min(t * each, p.top);
    let end = min(begin + each, p.top);
    let at = p.keys.base + id * p.keys.b;
    var n = 0u;
    for (var i = begin; i < end; i++) {
        let key = keys[at + i * p.keys.d]; // negative ones are larger than any key
        if (key >= lo && key < hi) { n++; }
    }
    counts[t] = n;
    workgroupBarrier();
    var o = 0u;
    var all = 0u;
    for (var x = 0u; x < 64u; x++) {
        if (x == t) { o = all; }
        all += counts[x];
    }
    if (t == 0u) { table[p.counts_at + list] = all; }
    for (var i = begin; i < end; i++) {
        let key = keys[at + i * p.keys.d];
        if (key >= lo && key < hi) {
            var batch = list;
            var row = key;
            if (p.page > 0u) {
                batch = ranges[ranges[3u * list + 2u] + key / p.page];
                row = key % p.page;
            }
            let word = 3u * (list * p.top + o);
            table[word] = key;
            table[word + 1u] = batch * p.k_b + row * p.k_s;
            table[word + 2u] = batch * p.v_b + row * p.v_s;
            o++;
        }
    }
    for (var word = 3u * (list * p.top + all) + t; word < 3u * (list + 1u) * p.top; word += 64u) { table[word] = 0u; }
}
