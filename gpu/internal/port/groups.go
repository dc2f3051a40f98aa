package port

// maxGroups is the number of bind groups that a device keeps. A call of a model's layer
// uses a few. Programs that need more use other windows each time.
const maxGroups = 256

// maxKeyBindings is the most bindings of a dispatch: attn's kernels have up to 11
// storage buffers and a uniform.
const maxKeyBindings = 12

// groupKey identifies a bind group by the numbers of its pipeline and buffers. Numbers
// are not used again, so a key cannot match the memory of a released buffer.
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

// groups keeps bind groups, because creating one costs more than the rest of a dispatch.
// They are in a ring, from the one used last to the one unused for longest. The device's
// lock guards it.
type groups struct {
	byKey map[groupKey]*group
	head  group
	free  func(rawGroup)
}

type group struct {
	key        groupKey
	g          rawGroup
	prev, next *group
}

func newGroups(free func(rawGroup)) *groups {
	c := &groups{byKey: map[groupKey]*group{}, free: free}
	c.head.prev, c.head.next = &c.head, &c.head
	return c
}

// get returns the group with key k.
func (c *groups) get(k *groupKey) (g rawGroup, ok bool) {
	x := c.byKey[*k]
	if x == nil {
		return g, false
	}
	x.unlink()
	c.push(x)
	return x.g, true
}

// put keeps g with key k.
func (c *groups) put(k *groupKey, g rawGroup) {
	x := &group{key: *k, g: g}
	c.byKey[*k] = x
	c.push(x)
}

// trim releases the groups that were unused for longest. It is called after a submission
// only, because one submission may use more groups than are kept.
func (c *groups) trim() {
	for len(c.byKey) > maxGroups {
		c.remove(c.head.prev)
	}
}

// dropBuffer releases the groups that bind a buffer.
func (c *groups) dropBuffer(id uint64) {
	c.drop(func(k *groupKey) bool {
		for i := range k.n {
			if k.spans[i].buffer == id {
				return true
			}
		}
		return false
	})
}

// dropPipeline releases the groups with a pipeline's layout.
func (c *groups) dropPipeline(id uint64) {
	c.drop(func(k *groupKey) bool { return k.pipeline == id })
}

func (c *groups) drop(is func(k *groupKey) bool) {
	for x := c.head.next; x != &c.head; {
		next := x.next
		if is(&x.key) {
			c.remove(x)
		}
		x = next
	}
}

func (c *groups) remove(x *group) {
	x.unlink()
	delete(c.byKey, x.key)
	c.free(x.g)
}

func (c *groups) push(x *group) {
	x.prev, x.next = &c.head, c.head.next
	x.prev.next, x.next.prev = x, x
}

func (x *group) unlink() { x.prev.next, x.next.prev = x.next, x.prev }
