package port

import (
	"container/list"
	"slices"
)

// maxGroups is the number of bind groups that a device keeps. A call of a model's layer
// uses a few. Programs that need more use other windows each time.
const maxGroups = 256

// MaxBindings is the most bindings of a dispatch: attn's kernels have up to 11
// storage buffers and a uniform.
const MaxBindings = 12

// groupKey identifies a bind group by the numbers of its pipeline and buffers. Numbers
// are not used again, so a key cannot match the memory of a released buffer.
type groupKey struct {
	pipeline uint64
	n        int
	spans    [MaxBindings]groupSpan
}

type groupSpan struct{ buffer, offset, size uint64 }

func (k *groupKey) add(buffer, offset, size uint64) {
	k.spans[k.n] = groupSpan{buffer, offset, size}
	k.n++
}

// groups keeps bind groups, because creating one costs more than the rest of a dispatch.
// The device's lock guards it.
type groups struct {
	byKey map[groupKey]*list.Element
	used  *list.List // of *group, the one used last first
	free  func(rawGroup)
}

type group struct {
	key groupKey
	raw rawGroup
}

func newGroups(free func(rawGroup)) *groups {
	return &groups{byKey: map[groupKey]*list.Element{}, used: list.New(), free: free}
}

// get returns the group with key k.
func (c *groups) get(k *groupKey) (g rawGroup, ok bool) {
	x := c.byKey[*k]
	if x == nil {
		return g, false
	}
	c.used.MoveToFront(x)
	return x.Value.(*group).raw, true
}

// put keeps g with key k.
func (c *groups) put(k *groupKey, g rawGroup) { c.byKey[*k] = c.used.PushFront(&group{*k, g}) }

// trim releases the groups that were unused for longest. It is called after a submission
// only, because one submission may use more groups than are kept.
func (c *groups) trim() {
	for len(c.byKey) > maxGroups {
		c.remove(c.used.Back())
	}
}

// dropBuffer releases the groups that bind a buffer.
func (c *groups) dropBuffer(id uint64) {
	c.drop(func(k *groupKey) bool {
		return slices.ContainsFunc(k.spans[:k.n], func(s groupSpan) bool { return s.buffer == id })
	})
}

// dropPipeline releases the groups with a pipeline's layout.
func (c *groups) dropPipeline(id uint64) {
	c.drop(func(k *groupKey) bool { return k.pipeline == id })
}

func (c *groups) drop(is func(k *groupKey) bool) {
	for x := c.used.Front(); x != nil; {
		next := x.Next()
		if is(&x.Value.(*group).key) {
			c.remove(x)
		}
		x = next
	}
}

func (c *groups) remove(x *list.Element) {
	g := c.used.Remove(x).(*group)
	delete(c.byKey, g.key)
	c.free(g.raw)
}
