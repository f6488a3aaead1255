package modelsim

import "math/bits"

// kvCache is vLLM's paged KV cache with its prefix cache. A KV block holds
// BlockTokens tokens. A prompt block is the unit that requests share: the
// tokens one caller-given id stands for, one or more KV blocks together.
//
// Every KV block is blank (never used), held by a sequence, or in the LRU of
// unreferenced ones, which still serve prefix hits until they are evicted.
// Blocks of dead output go through the LRU too: they push others out though
// nobody can hit them.
type kvCache struct {
	blockTokens  int // tokens in a KV block
	promptTokens int // tokens in a prompt block, a multiple of blockTokens
	promptUnits  int // KV blocks in a prompt block

	total    int // KV blocks
	blank    int
	lruUnits int // KV blocks in the LRU

	// entries[0] is the LRU's sentinel: next is the one to evict first, prev
	// the one used last.
	entries []kvEntry
	spare   []int32
	index   blockTable // computed prompt blocks by id
}

// kvEntry is a prompt block, or a run of dead private KV blocks in the LRU.
type kvEntry struct {
	id         uint64
	prev, next int32
	refs       int32
	units      int32
	indexed    bool // id maps to this entry
	dead       bool // private KV blocks that nobody can hit; evictable in part
}

func newKVCache(total, blockTokens, promptTokens int) *kvCache {
	k := &kvCache{
		blockTokens: blockTokens, promptTokens: promptTokens, promptUnits: promptTokens / blockTokens,
		total: total, blank: total,
	}
	k.entries = make([]kvEntry, 1, total/k.promptUnits+2)
	k.index = newBlockTable(total / k.promptUnits)
	return k
}

// free is how many KV blocks can be taken, evicting what nobody references.
func (k *kvCache) free() int { return k.blank + k.lruUnits }

// used is how many KV blocks sequences hold.
func (k *kvCache) used() int { return k.total - k.free() }

// cachedBlocks counts how many of the leading ids are computed and present.
func (k *kvCache) cachedBlocks(ids []uint64) int {
	for i, id := range ids {
		if k.index.get(id) == 0 {
			return i
		}
	}
	return len(ids)
}

// unreferenced counts the KV blocks among ids, all of them present, that sit in
// the LRU: a hit on them uses up free space.
func (k *kvCache) unreferenced(ids []uint64) int {
	n := 0
	for _, id := range ids {
		if e := &k.entries[k.index.get(id)]; e.refs == 0 {
			n += int(e.units)
		}
	}
	return n
}

// hit references the present prompt block id and returns its entry.
func (k *kvCache) hit(id uint64) int32 {
	i := k.index.get(id)
	e := &k.entries[i]
	if e.refs == 0 {
		k.unlink(i)
	}
	e.refs++
	return i
}

// newPromptBlock takes space for a prompt block about to be computed. The
// caller has checked free.
func (k *kvCache) newPromptBlock(id uint64) int32 {
	k.take(k.promptUnits)
	i := k.newEntry()
	k.entries[i] = kvEntry{id: id, refs: 1, units: int32(k.promptUnits)}
	return i
}

// computed makes a prompt block hittable. If another sequence computed the same
// block meanwhile, this copy stays unshared.
func (k *kvCache) computed(i int32) {
	e := &k.entries[i]
	if e.indexed {
		return
	}
	if k.index.get(e.id) == 0 {
		k.index.put(e.id, i)
		e.indexed = true
	}
}

// take uses up n KV blocks, evicting in LRU order; the caller has checked free.
func (k *kvCache) take(n int) {
	if n <= k.blank {
		k.blank -= n
		return
	}
	n -= k.blank
	k.blank = 0
	for n > 0 {
		i := k.entries[0].next
		if i == 0 {
			panic("BUG: KV blocks taken beyond what is free")
		}
		e := &k.entries[i]
		if e.dead && int(e.units) > n {
			e.units -= int32(n)
			k.lruUnits -= n
			return
		}
		k.unlink(i)
		if e.indexed {
			k.index.delete(e.id)
		}
		k.blank += max(0, int(e.units)-n)
		n -= min(n, int(e.units))
		k.spare = append(k.spare, i)
	}
}

// release gives back what a sequence holds: the private KV blocks first, then
// its prompt blocks from last to first, so that tails are evicted before heads.
func (k *kvCache) release(blocks []int32, private int) {
	if private > 0 {
		i := k.newEntry()
		k.entries[i] = kvEntry{units: int32(private), dead: true}
		k.pushLRU(i)
	}
	for j := len(blocks) - 1; j >= 0; j-- {
		i := blocks[j]
		e := &k.entries[i]
		if e.refs--; e.refs == 0 {
			k.pushLRU(i)
		}
	}
}

func (k *kvCache) newEntry() int32 {
	if n := len(k.spare); n > 0 {
		i := k.spare[n-1]
		k.spare = k.spare[:n-1]
		return i
	}
	k.entries = append(k.entries, kvEntry{})
	return int32(len(k.entries) - 1)
}

func (k *kvCache) pushLRU(i int32) {
	e, s := &k.entries[i], &k.entries[0]
	e.prev, e.next = s.prev, 0
	k.entries[s.prev].next = i
	s.prev = i
	k.lruUnits += int(e.units)
}

func (k *kvCache) unlink(i int32) {
	e := &k.entries[i]
	k.entries[e.prev].next = e.next
	k.entries[e.next].prev = e.prev
	k.lruUnits -= int(e.units)
}

// clear forgets every prompt block that nobody references.
func (k *kvCache) clear() {
	for i := k.entries[0].next; i != 0; {
		e := &k.entries[i]
		next := e.next
		if e.indexed {
			k.index.delete(e.id)
		}
		k.blank += int(e.units)
		k.spare = append(k.spare, i)
		i = next
	}
	k.entries[0].next, k.entries[0].prev, k.lruUnits = 0, 0, 0
}

// blockTable maps ids of blocks to entries: open addressing with linear probing. Half of a simulation's time goes into
// these few lines. A Go map took five times as long, since deletions leave marks in it that later searches walk over.
type blockTable struct {
	slots []blockSlot // a power of two, at least twice as many as are ever taken
	shift uint
}

type blockSlot struct {
	id    uint64
	entry int32 // 0 is free
}

func newBlockTable(most int) blockTable {
	log := bits.Len(uint(2*most + 2))
	return blockTable{make([]blockSlot, 1<<log), uint(64 - log)}
}

func (t *blockTable) home(id uint64) int { return int(id * 0x9e3779b97f4a7c15 >> t.shift) }

// find is where id is, or the free slot where it would go.
func (t *blockTable) find(id uint64) int {
	i := t.home(id)
	for t.slots[i].entry != 0 && t.slots[i].id != id {
		i = (i + 1) & (len(t.slots) - 1)
	}
	return i
}

// get returns the entry of id, 0 if there is none.
func (t *blockTable) get(id uint64) int32 { return t.slots[t.find(id)].entry }

func (t *blockTable) put(id uint64, entry int32) { t.slots[t.find(id)] = blockSlot{id, entry} }

// delete frees id's slot and moves up what was pushed on by it.
func (t *blockTable) delete(id uint64) {
	mask := len(t.slots) - 1
	gap := t.find(id)
	if t.slots[gap].entry == 0 {
		return
	}
	for i := (gap + 1) & mask; t.slots[i].entry != 0; i = (i + 1) & mask {
		if (i-t.home(t.slots[i].id))&mask >= (i-gap)&mask {
			t.slots[gap] = t.slots[i]
			gap = i
		}
	}
	t.slots[gap].entry = 0
}
