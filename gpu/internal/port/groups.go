package port

// maxGroups is how many bind groups a device keeps. A call of a model's layer
// uses a few; more than this only says that windows differ each time.
const maxGroups = 256

// maxKeyBindings is the most bindings that a dispatch may have: WebGPU's default
// limits allow 8 storage buffers, and attn's kernels have one uniform beside them.
const maxKeyBindings = 12

// groupKey is what a bind group is made of. Buffers and pipelines go by number:
// numbers are never used again, so that a key cannot mean another's memory.
type groupKey struct {
	pipeline uint64
	n        int
	spans    [maxKeyBindings]groupSpan
}

type groupSpan struct{ buffer, offset, size uint64 }

func (k *groupKey) add(buffer, offset, size uint64) {
	k.spans[k.n] = groupSpan{buffer, offset, size}
	k.n++
}

// groups keeps bind groups of a library's type G, as making one costs more than
// the rest of a dispatch. The device's lock guards it.
//
// Those that are kept are in a ring, the one used last behind the head.
type groups[G any] struct {
	byKey map[groupKey]*group[G]
	head  group[G]
	free  func(G)
}

type group[G any] struct {
	key        groupKey
	g          G
	prev, next *group[G]
}

func newGroups[G any](free func(G)) *groups[G] {
	c := &groups[G]{byKey: map[groupKey]*group[G]{}, free: free}
	c.head.prev, c.head.next = &c.head, &c.head
	return c
}

// get returns the group that is kept under k.
func (c *groups[G]) get(k *groupKey) (g G, ok bool) {
	x := c.byKey[*k]
	if x == nil {
		return g, false
	}
	x.unlink()
	c.push(x)
	return x.g, true
}

// put keeps g under k.
func (c *groups[G]) put(k *groupKey, g G) {
	x := &group[G]{key: *k, g: g}
	c.byKey[*k] = x
	c.push(x)
}

// trim lets go of what has not been used for longest. Only after a submission, as
// the one that is being recorded may have more groups than are kept.
func (c *groups[G]) trim() {
	for len(c.byKey) > maxGroups {
		c.remove(c.head.prev)
	}
}

// dropBuffer lets go of the groups that bind a buffer, before it goes.
func (c *groups[G]) dropBuffer(id uint64) {
	c.drop(func(k *groupKey) bool {
		for i := range k.n {
			if k.spans[i].buffer == id {
				return true
			}
		}
		return false
	})
}

// dropPipeline lets go of the groups that have a pipeline's layout.
func (c *groups[G]) dropPipeline(id uint64) {
	c.drop(func(k *groupKey) bool { return k.pipeline == id })
}

func (c *groups[G]) drop(is func(k *groupKey) bool) {
	for x := c.head.next; x != &c.head; {
		next := x.next
		if is(&x.key) {
			c.remove(x)
		}
		x = next
	}
}

func (c *groups[G]) remove(x *group[G]) {
	x.unlink()
	delete(c.byKey, x.key)
	c.free(x.g)
}

func (c *groups[G]) push(x *group[G]) {
	x.prev, x.next = &c.head, c.head.next
	x.prev.next, x.next.prev = x, x
}

func (x *group[G]) unlink() { x.prev.next, x.next.prev = x.next, x.prev }
