package port

import (
	"cmp"
	"maps"
	"slices"
)

// maxGroups is the number of bind groups that a device keeps. A call of a model's layer
// uses a few. Programs that need more use other windows each time.
const maxGroups = 256

// MaxBindings is the most bindings of a dispatch: attn's kernels have up to 11 storage buffers and a uniform.
const MaxBindings = 12

// groupKey identifies a bind group by the numbers of its pipeline and buffers. Numbers
// are not used again, so a key cannot match the memory of a released buffer.
type groupKey struct {
	pipeline uint64
	spans    [MaxBindings]groupSpan // zero where there is no binding: buffers are numbered from 1
}

type groupSpan struct{ buffer, offset, size uint64 }

// group is a bind group. A device keeps some, because creating one costs more than the rest of a dispatch.
type group struct {
	raw  Object
	used Ticket // the last submission before it was used
}

// trimGroups releases half of the groups, those that were unused for longest, when there are
// too many. It is called after a submission only, because one submission may use more.
func (d *device) trimGroups() {
	if len(d.groups) <= maxGroups {
		return
	}
	keys := slices.SortedFunc(maps.Keys(d.groups), func(a, b groupKey) int { return cmp.Compare(d.groups[a].used, d.groups[b].used) })
	for _, k := range keys[:len(keys)-maxGroups/2] {
		d.lib.ReleaseGroup(d.groups[k].raw)
		delete(d.groups, k)
	}
}

// dropGroups releases the groups with keys that match.
func (d *device) dropGroups(match func(k groupKey) bool) {
	maps.DeleteFunc(d.groups, func(k groupKey, g *group) bool {
		old := match(k)
		if old {
			d.lib.ReleaseGroup(g.raw)
		}
		return old
	})
}
