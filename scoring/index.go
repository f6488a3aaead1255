package scoring

import (
	"math/bits"
	"sync/atomic"

	"kvgate/pool"
)

// An Index remembers which endpoints hold which prompt prefixes. It is a table of plain integers of a fixed size: what
// does not fit displaces what is void, or else what is oldest, and two writers at the same instant may lose an entry, which
// costs a guess. It is safe for concurrent use; nobody waits for anybody.
//
// Each entry says that an endpoint has been sent one block of a prompt. Entries are found by the block's chained hash, so
// a block stands for everything before it too, and a prompt is known as far as somebody holds its blocks.
//
// An entry ages by the tokens that its endpoint has taken in since, and is void once they exceed the endpoint's KV cache:
// about when the server, which evicts what was used least recently, has forgotten it too. Servers free a prompt from its
// tail, so the tokens before a block count as taken in after it: tails are forgotten first.
type Index struct {
	buckets []bucket
	shift   uint                          // of a hash, to its bucket
	clocks  *[1 << slotBits]atomic.Uint64 // by slot: the clock under which the slot was last written to, as an entry with the limit for its tag

	// hits is the share of the prefix tokens believed to be cached that really were, as far as servers tell; 0 is unknown.
	hits pool.Float
}

// An entry is tag | epoch | slot | stamp.
const (
	stampBits = 24 // clock of the endpoint in units of stampTokens; wraps after 10⁹ tokens
	slotBits  = 16
	epochBits = 6
	tagBits   = 64 - epochBits - slotBits - stampBits

	stampMask  = 1<<stampBits - 1
	slotMask   = 1<<slotBits - 1
	epochMask  = 1<<epochBits - 1
	ownerShift = stampBits // to epoch and slot
	tagShift   = stampBits + slotBits + epochBits
	ownerMask  = 1<<(slotBits+epochBits) - 1

	stampTokens = 64

	limitUnitBits = stampBits - tagBits // a limit in place of a tag is in units of 64 stamps

	bucketWords = 16 // two cache lines, which processors fetch together
	wordBytes   = 8

	// restampUnits is how much older an entry's stamp must be for it to be written again: a hot prefix is read by every
	// request and would otherwise be written by every one as well.
	restampUnits = 16

	longestUnits = 1 << 17 // 8 million tokens: no prompt is longer
)

// DefaultIndexBytes is the size of an [Index] that suits up to a thousand endpoints.
const DefaultIndexBytes = 64 << 20

const minIndexBytes = 64 << 10

// NewIndex returns an empty Index of at most size bytes, rounded down to a power of two; DefaultIndexBytes if size is 0.
func NewIndex(size int) *Index {
	if size == 0 {
		size = DefaultIndexBytes
	}
	buckets := max(size, minIndexBytes) / (bucketWords * wordBytes)
	log := bits.Len(uint(buckets)) - 1
	return &Index{
		buckets: make([]bucket, 1<<log),
		shift:   uint(64 - log),
		clocks:  new([1 << slotBits]atomic.Uint64),
	}
}

// FaultIn has the system give the table its memory now: 10 to 30 ms of work for 64 MiB, which otherwise requests do page by
// page, twice a page, until the last one has been written to. It may run while the index is used.
func (x *Index) FaultIn() {
	const page = 4096 / wordBytes / bucketWords
	for i := 0; i < len(x.buckets); i += page {
		x.buckets[i][0].CompareAndSwap(0, 0) // a write, of what is there
	}
}

// Bytes is the memory that the table takes.
func (x *Index) Bytes() int { return (len(x.buckets)*bucketWords + len(x.clocks)) * wordBytes }

// A bucket is filled from its start, and no entry of it is ever taken out: what follows a 0 is 0, too.
type bucket [bucketWords]atomic.Uint64

func (x *Index) bucket(hash uint64) *bucket { return &x.buckets[hash>>x.shift] }

// tag is the part of the hash that an entry keeps: its lowest bits, which have no part in choosing the bucket. No tag is
// 0, so that an entry isn't either.
func tag(hash uint64) uint64 {
	return max(hash&(1<<tagBits-1), 1)
}

// A block that more endpoints hold than its bucket has room for goes on in further buckets: the beginning of a prompt that
// everybody sends is everywhere.
const chainBuckets = 4

// maxMatches bounds the endpoints that are found for one prompt.
const maxMatches = chainBuckets * bucketWords

// A match is an endpoint that holds the start of a prompt.
type match struct {
	row    int32 // in the snapshot
	blocks int   // of Request.Prefix
	tokens int32 // of the prompt

	owner uint64 // epoch and slot
	clock uint64 // of the endpoint now
	limit uint64 // largest age of an entry that it still holds
}

// A slotSet is a set of slots; it is 8 KiB.
type slotSet [1 << slotBits / 64]uint64

func (s *slotSet) has(slot uint64) bool { return s[slot/64]>>(slot%64)&1 != 0 }
func (s *slotSet) add(slot uint64)      { s[slot/64] |= 1 << (slot % 64) }

// lookup appends to out the endpoints of req's pool that hold the start of its prompt, and how much of it each holds. seen
// is scratch, and empty before and after.
func (x *Index) lookup(req *Request, s *pool.Snapshot, out []match, seen *slotSet) []match {
	l := search{x, s, req.Prefix, min(len(req.Target.Rows), maxMatches), out, seen}
	l.blocks(0, len(req.Prefix))
	for i := range l.out {
		seen[(l.out[i].owner&slotMask)/64] = 0
	}
	return l.out
}

// A search is one lookup.
type search struct {
	x      *Index
	s      *pool.Snapshot
	prefix []uint64
	most   int // matches
	out    []match
	seen   *slotSet // slots of out
}

// blocks finds the endpoints that hold block lo, and as much of what follows before hi; those that hold hi are in l.out.
//
// It goes from the last block to the first, so that the first entry of an endpoint is the longest prefix that it holds: an
// entry stands for all blocks before it, which are forgotten later, both by servers and here. So where nobody new holds the
// first blocks of a range nobody new holds the others, and they aren't looked at: of a prompt that nobody knows, all but its
// beginning. It takes several blocks to tell, since others displace entries; and a block that no longer has room in the
// table for all who hold it tells nothing, so they are not missed.
func (l *search) blocks(lo, hi int) {
	if len(l.out) >= l.most {
		return
	}
	if hi-lo > askedBlocks {
		if l.anyNew(l.prefix[lo : lo+askedBlocks]) {
			middle := int(uint(lo+hi) / 2)
			l.blocks(middle, hi)
			l.blocks(lo, middle)
		}
		return
	}
	l.x.touch(l.prefix[lo:hi])
	for k := hi - 1; k >= lo && len(l.out) < l.most; k-- {
		l.block(k)
	}
}

// askedBlocks is how many blocks tell whether those behind them may be known.
const askedBlocks = 4

// anyNew reports whether an endpoint that isn't in l.out holds one of the blocks, or may have lost it for want of room.
func (l *search) anyNew(blocks []uint64) bool {
	l.x.touch(blocks)
	var m match
	for _, hash := range blocks {
		t := tag(hash)
		b := l.x.bucket(hash)
		for link := uint64(1); ; link++ {
			same := 0
			for i := range b {
				if w := b[i].Load(); w>>tagShift == t {
					same++
					if l.isNew(w, &m) {
						return true
					}
				}
			}
			if same < bucketWords {
				break
			}
			if link == chainBuckets {
				return true
			}
			b = l.x.bucket(mix(hash, link))
		}
	}
	return false
}

// isNew reports whether the entry w is of an endpoint that still holds it and isn't in l.out, and fills m if so.
func (l *search) isNew(w uint64, m *match) bool {
	slot := w >> ownerShift & slotMask
	if l.seen.has(slot) {
		return false
	}
	row := l.s.RowOf(uint16(slot))
	if row < 0 {
		return false
	}
	m.row = row
	m.at(&l.s.Rows[row])
	return w>>ownerShift&ownerMask == m.owner && m.age(w) <= m.limit
}

// block adds the holders of block k. An entry counts with the one before it only: tags are short, and a prompt has hundreds
// of blocks.
func (l *search) block(k int) {
	t := tag(l.prefix[k])
	b := l.x.bucket(l.prefix[k])
	m := match{blocks: k + 1}
	for link := uint64(1); ; link++ {
		same := 0
		for i := range b {
			w := b[i].Load()
			if w>>tagShift != t {
				continue
			}
			same++
			if !l.isNew(w, &m) || k > 0 && !l.x.holds(l.prefix[k-1], m.owner) {
				continue
			}
			l.seen.add(w >> ownerShift & slotMask)
			if l.out = append(l.out, m); len(l.out) == maxMatches {
				return
			}
		}
		if same < bucketWords || link == chainBuckets {
			return
		}
		b = l.x.bucket(mix(l.prefix[k], link))
	}
}

// holds reports whether owner has an entry for the block, however old, or may have lost it for want of room.
func (x *Index) holds(hash, owner uint64) bool {
	t := tag(hash)
	key := t<<(slotBits+epochBits) | owner
	b := x.bucket(hash)
	for link := uint64(1); ; link++ {
		same := 0
		for i := range b {
			w := b[i].Load()
			if w>>ownerShift == key {
				return true
			}
			if w>>tagShift == t {
				same++
			}
		}
		if same < bucketWords || link == chainBuckets {
			return same == bucketWords
		}
		b = x.bucket(mix(hash, link))
	}
}

// at fills m with what r's endpoint is now.
func (m *match) at(r *pool.Row) {
	m.owner = owner(r)
	m.clock = uint64(r.IntakeTokens()) / stampTokens
	capacity := float32(r.KVCapacity)
	if capacity == 0 {
		_, learned := r.Learned()
		capacity = learnedOr(learned)
	}
	m.limit = uint64(capacity / stampTokens)
}

// tick notes r's clock and limit, which m has, before entries of it are written.
func (x *Index) tick(r *pool.Row, m *match) {
	x.clocks[r.Slot].Store(min(m.limit>>limitUnitBits, 1<<tagBits-1)<<tagShift | m.owner<<ownerShift | m.clock&stampMask)
}

func (m *match) age(word uint64) uint64 { return (m.clock - word) & stampMask }

func owner(r *pool.Row) uint64 {
	return uint64(r.Endpoint.Epoch()&epochMask)<<slotBits | uint64(r.Slot)
}

// touch loads the buckets of hashes, so that the misses of all of them overlap. It returns something that depends on every
// load, or they would not be made.
func (x *Index) touch(hashes []uint64) (sum uint64) {
	for _, h := range hashes {
		b := x.bucket(h)
		sum |= b[0].Load() | b[bucketWords/2].Load()
	}
	return sum
}

// touchBlocks is how many buckets are loaded ahead.
const touchBlocks = 32

// insert notes that req's prompt was sent to r's endpoint, after it was booked there.
func (x *Index) insert(req *Request, r *pool.Row, sc blockScale) {
	var m match
	m.at(r)
	x.tick(r, &m)
	reread, from := uint64(0), sc.tokens(0)
	for k, hash := range req.Prefix {
		if k%touchBlocks == 0 {
			x.touch(req.Prefix[k:min(k+touchBlocks, len(req.Prefix))])
		}
		to := sc.tokens(k + 1)
		stamp := (m.clock - uint64(to)/stampTokens) & stampMask
		if w := x.put(hash, m.owner, stamp); w != 0 {
			if age := m.age(w); age <= m.limit {
				reread += uint64(to-from) * age
			}
		}
		from = to
	}
	// A block that was there already is used again, which makes it younger than everything used since its last use: to
	// those the server has taken in one block more, to what is older nothing has changed. How many are how old is not
	// known; taken as spread evenly, the share of them is the block's age over the oldest possible one.
	r.Endpoint.TakeIn(int64(reread / max(m.limit, 1)))
}

// adapterKey stands for an adapter as a block does for a prefix.
func adapterKey(t *pool.Target) uint64 { return mix(t.Hash, 0x61646170746572) }

// insertAdapter notes that r's endpoint was sent a request for the adapter.
func (x *Index) insertAdapter(t *pool.Target, r *pool.Row) {
	var m match
	m.at(r)
	x.tick(r, &m)
	x.put(adapterKey(t), m.owner, m.clock&stampMask)
}

// holders appends to out the rows that have been sent what hash stands for, however long ago.
func (x *Index) holders(hash uint64, s *pool.Snapshot, out []int32) []int32 {
	t := tag(hash)
	b := x.bucket(hash)
	for link := uint64(1); ; link++ {
		same := 0
		for i := range b {
			w := b[i].Load()
			if w>>tagShift != t {
				continue
			}
			same++
			if row := s.RowOf(uint16(w >> ownerShift)); row >= 0 && owner(&s.Rows[row]) == w>>ownerShift&ownerMask && len(out) < cap(out) {
				out = append(out, row)
			}
		}
		if same < bucketWords || link == chainBuckets {
			return out
		}
		b = x.bucket(mix(hash, link))
	}
}

// A blockScale says how many tokens the blocks of a request's Prefix stand for.
type blockScale struct {
	blockTokens int32   // of each block; 0 where they were cut by bytes
	perByte     float64 // tokens
	most        int32   // a server computes at least the last token of a prompt, whatever it has cached
}

// tokens is how many tokens the first n blocks stand for.
func (s blockScale) tokens(n int) int32 {
	if s.blockTokens > 0 {
		return min(int32(n)*s.blockTokens, s.most)
	}
	return min(int32(float64(PrefixBytes(n))*s.perByte), s.most)
}

// learnHits takes in that of believed cached tokens only cached were.
func (x *Index) learnHits(believed, cached int32) {
	if believed < hitSample {
		return
	}
	ratio := min(2, float64(cached)/float64(believed))
	x.hits.Update(func(v float64) float64 {
		return min(1, max(0.05, first(v, 1)*(1+hitGain*(ratio-1))))
	})
}

const (
	hitSample = 256 // tokens; less than a block of some servers says nothing
	hitGain   = 0.02
)

// believe is what is made of n tokens found.
func (x *Index) believe(n int32) int32 {
	h := x.hits.Load()
	if h == 0 || h == 1 {
		return n
	}
	return int32(h * float64(n))
}

// put notes that owner holds the block, and returns the entry that said so before; 0 if none did.
func (x *Index) put(hash, owner, stamp uint64) (before uint64) {
	t := tag(hash)
	key := t<<(slotBits+epochBits) | owner
	b := x.bucket(hash)
	for link := uint64(1); ; link++ {
		free, same := -1, 0
		for i := range b {
			w := b[i].Load()
			if w>>tagShift == t {
				if w>>ownerShift == key {
					// A difference that wraps is a stamp older than the one there: this block lies further back in this prompt.
					if d := (stamp - w) & stampMask; d >= restampUnits && d < stampMask-longestUnits {
						b[i].Store(key<<ownerShift | stamp)
					}
					return w
				}
				same++
			}
			if w == 0 {
				free = i
				break
			}
		}
		if free < 0 {
			if victim, void := x.victim(b, hash>>tagBits); void || same < bucketWords || link == chainBuckets {
				free = int(victim)
			}
		}
		if free >= 0 {
			b[free].Store(key<<ownerShift | stamp)
			return 0
		}
		b = x.bucket(mix(hash, link))
	}
}

// victim is the entry to displace: one that its endpoint no longer holds, which is void,
// or else the one whose endpoint has taken in most since. Few caches are as large as the table, which is then full of
// entries that are void, and the first one will do; the search begins anywhere, so that none is always the first.
func (x *Index) victim(b *bucket, begin uint64) (victim uint64, void bool) {
	most := uint64(0)
	for k := range uint64(bucketWords) {
		i := (begin + k) % bucketWords
		w := b[i].Load()
		c := x.clocks[w>>ownerShift&slotMask].Load()
		age := (c - w) & stampMask
		if (c^w)>>ownerShift&ownerMask != 0 || age>>limitUnitBits > c>>tagShift {
			return i, true
		}
		// No branch: which entry is the oldest can't be predicted.
		most = max(most, age*bucketWords+i)
	}
	return most % bucketWords, false
}
