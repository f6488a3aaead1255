package modelsim

import (
	"math/rand/v2"
	"testing"
)

// Evicting takes the tail of a prompt before its head, the dead output of the
// same request before either, and another request's older blocks before all.
func TestKVCacheEvictsTailsBeforeHeads(t *testing.T) {
	k := newKVCache(8, 16, 16)
	hold := func(ids ...uint64) (entries []int32) {
		for _, id := range ids {
			i := k.newPromptBlock(id)
			k.computed(i)
			entries = append(entries, i)
		}
		return entries
	}
	first, second := hold(1, 2), hold(11, 12, 13)
	k.take(1)
	k.release(first, 0)
	k.release(second, 1)
	present := func(want ...uint64) {
		t.Helper()
		if k.index.count() != len(want) {
			t.Fatalf("%d blocks cached; want %v", k.index.count(), want)
		}
		for _, id := range want {
			if k.index.get(id) == 0 {
				t.Fatalf("block %d is gone; want %v", id, want)
			}
		}
	}
	if k.free() != 8 || k.blank != 2 {
		t.Fatalf("free %d, blank %d; want 8, 2", k.free(), k.blank)
	}
	k.take(2)
	present(1, 2, 11, 12, 13)
	k.take(1)
	present(1, 11, 12, 13)
	k.take(1)
	present(11, 12, 13)
	k.take(1) // the dead output block
	present(11, 12, 13)
	k.take(1)
	present(11, 12)
	k.take(1)
	present(11)
}

// A run of dead blocks is evicted block by block; a coarse prompt block at once,
// what is left of it being free.
func TestKVCacheEvictsInPart(t *testing.T) {
	k := newKVCache(8, 16, 64)
	p := k.newPromptBlock(1)
	k.computed(p)
	k.take(4)
	k.release([]int32{p}, 4)
	f := func(take, free, blank, cached int) {
		t.Helper()
		k.take(take)
		if k.free() != free || k.blank != blank || k.index.count() != cached {
			t.Fatalf("free %d, blank %d, cached %d; want %d, %d, %d", k.free(), k.blank, k.index.count(), free, blank, cached)
		}
	}
	f(3, 5, 0, 1)
	f(2, 3, 3, 0) // one dead block, then one of the prompt block's four
}

// A hit on an unreferenced block takes it out of the LRU; two holders count once.
func TestKVCacheReferences(t *testing.T) {
	k := newKVCache(4, 16, 16)
	i := k.newPromptBlock(7)
	k.computed(i)
	k.release([]int32{i}, 0)
	if k.used() != 0 || k.unreferenced([]uint64{7}) != 1 {
		t.Fatalf("used %d, unreferenced %d; want 0, 1", k.used(), k.unreferenced([]uint64{7}))
	}
	a, b := k.hit(7), k.hit(7)
	if a != i || b != i || k.used() != 1 || k.unreferenced([]uint64{7}) != 0 {
		t.Fatalf("hits %d %d of %d, used %d; want the same entry held once", a, b, i, k.used())
	}
	k.release([]int32{a}, 0)
	if k.used() != 1 {
		t.Fatalf("used %d after one of two holders left; want 1", k.used())
	}
	// A second copy computed meanwhile stays unshared, and its end leaves the
	// first one in place.
	c := k.newPromptBlock(7)
	k.computed(c)
	k.release([]int32{c}, 0)
	k.take(3)
	if got := k.cachedBlocks([]uint64{7}); got != 1 {
		t.Fatalf("cached %d after the copy was evicted; want 1", got)
	}
}

// The table of blocks does what a map does.
func TestBlockTable(t *testing.T) {
	const most = 300
	table, want := newBlockTable(most), map[uint64]int32{}
	r := rand.New(rand.NewPCG(1, 1))
	for range 200_000 {
		id := r.Uint64N(1000) * 0x9e3779b97f4a7c15 >> 3 // many share their home
		switch {
		case len(want) < most && r.IntN(2) == 0 && want[id] == 0:
			entry := 1 + r.Int32N(1000)
			table.put(id, entry)
			want[id] = entry
		case r.IntN(2) == 0:
			table.delete(id)
			delete(want, id)
		default:
			if got := table.get(id); got != want[id] {
				t.Fatalf("id %x: entry %d; want %d", id, got, want[id])
			}
		}
	}
	for id, entry := range want {
		if got := table.get(id); got != entry {
			t.Errorf("id %x: entry %d; want %d", id, got, entry)
		}
	}
}

func (t *blockTable) count() (n int) {
	for i := range t.slots {
		if t.slots[i].entry != 0 {
			n++
		}
	}
	return n
}
