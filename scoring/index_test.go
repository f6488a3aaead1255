package scoring

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"kvgate/pool"
)

func TestHashPrefixChains(t *testing.T) {
	body := make([]byte, 100_000)
	for i := range body {
		body[i] = byte(i * i >> 3)
	}
	whole := HashPrefix(nil, 1, body)
	if got := PrefixBytes(len(whole)); got > len(body) || got < len(body)-coarseBytes {
		t.Errorf("blocks cover %d of %d bytes", got, len(body))
	}
	equal := func(a, b []uint64) int {
		n := 0
		for n < len(a) && n < len(b) && a[n] == b[n] {
			n++
		}
		return n
	}
	// Where parts are cut does not matter.
	for _, cut := range []int{0, 1, 255, 256, 257, 5000, 99_999} {
		for _, cut2 := range []int{cut, cut + (len(body)-cut)/2, len(body)} {
			got := HashPrefix(nil, 1, body[:cut], body[cut:cut2], nil, body[cut2:])
			if equal(got, whole) != len(whole) || len(got) != len(whole) {
				t.Errorf("cut at %d and %d: other hashes", cut, cut2)
			}
		}
	}
	// A block differs from the first changed byte on, and not before.
	for _, at := range []int{0, 300, 4096, 40_000, PrefixBytes(len(whole)) - 1} {
		other := bytes.Clone(body)
		other[at] ^= 1
		want := 0
		for PrefixBytes(want+1) <= at {
			want++
		}
		if n := equal(HashPrefix(nil, 1, other), whole); n != want {
			t.Errorf("byte %d changed: %d blocks are the same; want %d", at, n, want)
		}
		for i, h := range HashPrefix(nil, 1, other)[want:] {
			if h == whole[want+i] {
				t.Errorf("byte %d changed: block %d is the same", at, want+i)
			}
		}
	}
	if equal(HashPrefix(nil, 2, body), whole) != 0 {
		t.Error("another seed gives the same hashes")
	}
	tg := &pool.Target{Hash: 5}
	if PrefixSeed(tg, nil) == PrefixSeed(tg, []byte("salt")) || PrefixSeed(tg, []byte("a")) == PrefixSeed(tg, []byte("b")) {
		t.Error("cache salts share a seed")
	}
	if n := len(HashPrefix(nil, 1, make([]byte, 3<<20))); n != maxPrefixBlocks {
		t.Errorf("%d blocks of a 3 MiB prompt; want at most %d", n, maxPrefixBlocks)
	}
}

// prompt makes a request with a prompt of its own.
func prompt(s *pool.Snapshot, body []byte) *Request {
	tg := s.TargetString("m")
	return &Request{
		Target: tg, PromptTokens: int32(len(body) / 4), PromptBytes: int32(len(body)), Stream: true,
		Prefix: HashPrefix(nil, PrefixSeed(tg, nil), body),
	}
}

func text(seed, n int) []byte {
	b := make([]byte, 0, n+8)
	for x := uint64(seed)*0x9e3779b97f4a7c15 + 1; len(b) < n; x = x*6364136223846793005 + 1442695040888963407 {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b[:n]
}

func TestTokenArraysOfEqualLengthDiffer(t *testing.T) { // D9
	tab := newTable(t, 8, nil)
	s := tab.Load()
	p := newPolicy(t, Config{Index: NewIndex(1 << 20)})
	counts := make([]int, 8)
	var b pool.Booking
	for i := range 800 {
		var ids []byte
		for j := range 500 {
			ids = strconv.AppendInt(append(ids, ','), int64(10_000+(i*7919+j*104729)%80_000), 10)
		}
		counts[choose(t, p, prompt(s, ids), s, &b)]++
		b.End()
	}
	if x := chiSquare(counts); x > chiSquare7 {
		t.Errorf("800 different token arrays went to %v: chi-square %.1f; want below %v", counts, x, chiSquare7)
	}
}

func TestConversationReturnsToItsEndpoint(t *testing.T) {
	for _, c := range []Config{{}, {Weights: map[string]float64{"queue": 2, "kv_cache": 2, "prefix": 3}}} {
		tab := newTable(t, 8, nil)
		s := tab.Load()
		c.Index = NewIndex(1 << 20)
		p := newPolicy(t, c)
		var b pool.Booking
		for conv := range 50 {
			body := text(conv, 6000)
			first := choose(t, p, prompt(s, body), s, &b)
			b.End()
			for range 3 {
				body = append(body, text(conv+1000, 1500)...)
				if got := choose(t, p, prompt(s, body), s, &b); got != first {
					t.Fatalf("%s: conversation %d went to %d, then to %d", p.Name(), conv, first, got)
				}
				b.End()
			}
		}
	}
}

func TestPrefixMissGoesToTheIdleEndpoint(t *testing.T) { // B7
	tab := newTable(t, 2, func(i int) pool.Load {
		l := idle()
		if i == 0 {
			l.Running, l.Waiting, l.KVCacheUtilization = 40, 50, 0.95
		}
		return l
	})
	s := tab.Load()
	p := newPolicy(t, Config{Index: NewIndex(1 << 20)})
	var b pool.Booking
	for i := range 100 {
		if got := choose(t, p, prompt(s, text(i, 4000)), s, &b); got != 1 {
			t.Fatalf("a new prefix went to the endpoint with 50 waiting and a full cache")
		}
		b.End()
	}
}

func TestAffinitySurvivesImbalance(t *testing.T) { // B8
	tab := newTable(t, 4, func(i int) pool.Load {
		l := idle()
		l.Running, l.KVCacheUtilization = 30, 0.5
		if i == 0 {
			l.Running, l.KVCacheUtilization = 40, 0.58 // somewhat busier: 34,000 tokens more
		}
		return l
	})
	s := tab.Load()
	p := newPolicy(t, Config{Index: NewIndex(1 << 20)})
	var b pool.Booking
	hits := 0
	for i := range 100 {
		req := prompt(s, text(i, 8000))
		s.Rows[i%4].Book(&b, pool.Claim{PendingTokens: 2000, KVTokens: 2000})
		p.index.insert(req, &s.Rows[i%4], blockScale{perByte: 0.25, most: 1999})
		b.End()
		if choose(t, p, req, s, &b) == i%4 {
			hits++
		}
		b.End()
	}
	if hits < 95 {
		t.Errorf("%d of 100 went where their prefix is; want nearly all", hits)
	}
}

func TestHotPrefixSpreadsWithLoad(t *testing.T) { // B9
	tab := newTable(t, 8, nil)
	s := tab.Load()
	p := newPolicy(t, Config{Index: NewIndex(1 << 20)})
	body := text(1, 8000)
	bookings := make([]pool.Booking, 512) // of 4,096 requests, so many at a time
	for i := range 4096 {
		b := &bookings[i%len(bookings)]
		b.End()
		choose(t, p, prompt(s, append(body, text(i, 600)...)), s, b)
		bookings[(i+len(bookings)/2)%len(bookings)].FirstToken()
	}
	for i := range s.Rows {
		if n := s.Rows[i].Booked().Requests; n < 512/8/2 || n > 512/8*2 {
			t.Errorf("endpoint %d holds %d of 512; want about 64", i, n)
		}
	}
}

func TestPrefixesAgeWithTheCache(t *testing.T) {
	tab := newTable(t, 1, nil)
	s := tab.Load()
	r := &s.Rows[0]
	x := NewIndex(1 << 20)
	found := func(req *Request) int {
		if m := x.lookup(req, s, nil, new(slotSet)); len(m) > 0 {
			return m[0].blocks
		}
		return 0
	}
	take := func(tokens int64) {
		var b pool.Booking
		r.Book(&b, pool.Claim{PendingTokens: tokens})
		b.End()
	}
	body := text(1, 400_000) // 100,000 tokens
	req := prompt(s, body)
	take(100_000)
	x.insert(req, r, blockScale{perByte: 0.25, most: 99_999})
	n := len(req.Prefix)
	if got := found(req); got != n {
		t.Fatalf("%d of %d blocks found at once", got, n)
	}
	// 421,000 tokens fit. After 360,000 more the tail is gone and the head is not.
	take(360_000)
	if got := found(req); got < n/4 || got > n*9/10 {
		t.Errorf("%d of %d blocks found after 360,000 further tokens; want the head only", got, n)
	}
	// What is used again is young again.
	x.insert(req, r, blockScale{perByte: 0.25, most: 99_999})
	if got := found(req); got != n {
		t.Errorf("%d of %d blocks found after they were used again", got, n)
	}
	take(430_000)
	if got := found(req); got != 0 {
		t.Errorf("%d blocks found after the cache was filled once over", got)
	}
	// A restart voids everything.
	x.insert(req, r, blockScale{perByte: 0.25, most: 99_999})
	l := idle()
	l.StartTime = 5000
	scrape(tab, r.Endpoint, l, second0+1)
	l.StartTime = 6000
	scrape(tab, r.Endpoint, l, second0+2)
	s = tab.Load()
	if got := found(req); got != 0 {
		t.Errorf("%d blocks found after a restart", got)
	}
}

func TestPrefixesOfAnEndpointThatLeftAreVoid(t *testing.T) {
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	x := NewIndex(1 << 20)
	for i := range 20 { // one pod after the other on the same slot
		now := second0 + pool.Instant(i)*3600*aSecond
		spec := pool.Spec{Pool: "p", URL: "http://127.0.0.1:1", SourceID: fmt.Sprint(i)}
		for range 2 { // the second time frees the slot of the one before
			if _, _, err := tab.SetEndpoints("p", []pool.Spec{spec}, now); err != nil {
				t.Fatal(err)
			}
		}
		s := tab.Load()
		req := prompt(s, text(1, 4000))
		if m := x.lookup(req, s, nil, new(slotSet)); len(m) != 0 {
			t.Fatalf("pod %d is believed to hold what pod %d was sent", i, i-1)
		}
		x.insert(req, &s.Rows[0], blockScale{perByte: 0.25, most: 999})
		if m := x.lookup(req, s, nil, new(slotSet)); len(m) != 1 {
			t.Fatalf("pod %d: its own entry is not found", i)
		}
	}
}

func TestIndexIsBounded(t *testing.T) { // G1
	tab := newTable(t, 4, nil)
	s := tab.Load()
	x := NewIndex(1 << 20)
	want := x.Bytes()
	sc := blockScale{perByte: 0.25, most: 1999}
	var b pool.Booking
	body := text(1, 8000)
	n := 200_000
	if testing.Short() || raceDetector {
		n = 30_000
	}
	req := prompt(s, body)
	for i := range n {
		binary.LittleEndian.PutUint64(body, uint64(i))
		r := &s.Rows[i%4]
		r.Book(&b, pool.Claim{PendingTokens: 2000})
		b.End()
		req.Prefix = HashPrefix(req.Prefix[:0], 1, body)
		x.insert(req, r, sc)
	}
	if x.Bytes() != want || want > 2<<20 {
		t.Errorf("%d bytes after %d prompts; want %d", x.Bytes(), n, want)
	}
	// The table is full of what is long gone. What is recent is found all the same.
	for i := n - 50; i < n; i++ {
		binary.LittleEndian.PutUint64(body, uint64(i))
		req.Prefix = HashPrefix(req.Prefix[:0], 1, body)
		if m := x.lookup(req, s, nil, new(slotSet)); len(m) != 1 || m[0].blocks < len(req.Prefix)/2 || m[0].row != int32(i%4) {
			t.Errorf("prompt %d of %d is not found", i, n)
		}
	}
}

func TestIndexRaces(t *testing.T) {
	tab := newTable(t, 4, nil)
	x := NewIndex(0x10000)
	p := newPolicy(t, Config{Index: x})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			var b pool.Booking
			for i := range 300 {
				s := tab.Load()
				d, err := p.Choose(prompt(s, text(i%7, 20_000)), s, second0+1, &b)
				if err != nil {
					t.Error(err)
					return
				}
				p.FirstToken(&d, 1e8)
				p.End(&d, Usage{PromptTokens: 5000, CachedTokens: 100, OutputTokens: 5, Duration: 1e8})
				b.End()
				if g == 0 && i%10 == 0 {
					scrape(tab, d.Endpoint, idle(), second0+pool.Instant(i))
				}
			}
		})
	}
	wg.Wait()
}

func FuzzHashPrefix(f *testing.F) {
	f.Add([]byte("abc"), uint16(1), uint16(2))
	f.Add(bytes.Repeat([]byte("x"), 5000), uint16(300), uint16(4097))
	f.Fuzz(func(t *testing.T, body []byte, a, b uint16) {
		whole := HashPrefix(nil, 1, body)
		i := min(int(a), len(body))
		j := min(i+int(b), len(body))
		cut := HashPrefix(nil, 1, body[:i], body[i:j], body[j:])
		if len(cut) != len(whole) {
			t.Fatalf("%d blocks in parts; want %d", len(cut), len(whole))
		}
		for k := range cut {
			if cut[k] != whole[k] {
				t.Fatalf("block %d differs", k)
			}
		}
	})
}

// A system prompt that every conversation begins with is soon on more endpoints than a bucket has entries for. The
// conversations go back to where they were all the same, however large the fleet.
func TestConversationsReturnInLargeFleets(t *testing.T) {
	for _, n := range []int{24, 64, 200} {
		s := newTable(t, n, nil).Load()
		p := newPolicy(t, Config{Index: NewIndex(4 << 20)})
		system := text(0, 4096)
		bookings := make([]pool.Booking, 2*n)
		const conversations = 600
		went := make([]int, conversations)
		used := make(map[int]bool)
		turn := func(i, n int) *Request {
			return prompt(s, append(bytes.Clone(system), text(i+1, n)...))
		}
		for i := range went {
			b := &bookings[i%len(bookings)]
			b.End()
			went[i] = choose(t, p, turn(i, 3000), s, b)
			used[went[i]] = true
		}
		for i := range bookings {
			bookings[i].End()
		}
		if len(used) < n/2 {
			t.Errorf("%d endpoints: conversations under load went to %d of them", n, len(used))
		}
		back := 0
		var b pool.Booking
		for i := range went {
			if choose(t, p, turn(i, 6000), s, &b) == went[i] {
				back++
			}
			b.End()
		}
		if back < conversations*97/100 {
			t.Errorf("%d endpoints: %d of %d conversations went back to theirs; want nearly all", n, back, conversations)
		}
	}
}

func TestPrefixHeldByAHundredEndpointsIsFound(t *testing.T) {
	s := newTable(t, 100, nil).Load()
	x := NewIndex(1 << 20)
	req := prompt(s, text(1, 8000))
	sc := blockScale{perByte: 0.25, most: 1999}
	for i := range s.Rows {
		x.insert(req, &s.Rows[i], sc)
	}
	var seen slotSet
	m := x.lookup(req, s, nil, &seen)
	if len(m) != maxMatches {
		t.Errorf("%d of 100 holders found; want %d", len(m), maxMatches)
	}
	rows := make(map[int32]bool)
	for _, f := range m {
		if f.blocks != len(req.Prefix) || rows[f.row] {
			t.Errorf("row %d with %d blocks; want each once, with %d", f.row, f.blocks, len(req.Prefix))
		}
		rows[f.row] = true
	}
	if seen != (slotSet{}) {
		t.Error("the scratch set is not empty afterwards")
	}
	if m := x.lookup(prompt(s, text(2, 8000)), s, nil, &seen); len(m) != 0 {
		t.Errorf("another prompt is found on %d endpoints", len(m))
	}
}

// Whoever was sent the start of a prompt is found, with as much of it as it was sent, whatever others hold of it.
func TestLookupFindsTheLongestOfEach(t *testing.T) {
	const rows, prompts, blocks, common = 40, 24, 300, 120
	s := newTable(t, rows, nil).Load()
	sc := blockScale{perByte: 0.25, most: 1 << 20}
	r := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		x := NewIndex(16 << 20)
		reqs := make([]*Request, prompts)
		shared := make([]int, prompts) // how much of its beginning has the next prompt, too
		for p := range reqs {
			reqs[p] = &Request{Target: s.TargetString("m"), Prefix: make([]uint64, 1+r.IntN(blocks))}
			n := 0
			if p > 0 && r.IntN(4) > 0 {
				n = copy(reqs[p].Prefix, reqs[p-1].Prefix[:min(len(reqs[p-1].Prefix), r.IntN(common))])
				shared[p-1] = n
			}
			for k := n; k < len(reqs[p].Prefix); k++ {
				reqs[p].Prefix[k] = r.Uint64()
			}
		}
		var want [prompts][rows]int
		for range 1 + r.IntN(100) {
			p, row := r.IntN(prompts), r.IntN(rows)
			part := *reqs[p]
			n := 1 + r.IntN(len(part.Prefix))
			part.Prefix = part.Prefix[:n]
			x.insert(&part, &s.Rows[row], sc)
			want[p][row] = max(want[p][row], n)
			for q, n := p, n; q > 0; q-- {
				n = min(n, shared[q-1])
				want[q-1][row] = max(want[q-1][row], n)
			}
			for q, n := p, n; q < prompts-1; q++ {
				n = min(n, shared[q])
				want[q+1][row] = max(want[q+1][row], n)
			}
		}
		var seen slotSet
		for p, req := range reqs {
			var got [rows]int
			for _, m := range x.lookup(req, s, nil, &seen) {
				got[m.row] = m.blocks
			}
			if got != want[p] {
				t.Fatalf("prompt %d of %d blocks: found\n%v; want\n%v", p, len(req.Prefix), got, want[p])
			}
		}
		if seen != (slotSet{}) {
			t.Fatal("the scratch set is not empty afterwards")
		}
	}
}

// A few entries that others displaced don't hide what is behind them.
func TestLostEntriesHideNothing(t *testing.T) {
	s := newTable(t, 2, nil).Load()
	sc := blockScale{perByte: 0.25, most: 1 << 20}
	req := prompt(s, text(1, 100_000))
	n := len(req.Prefix)
	var seen slotSet
	for first := range n - askedBlocks {
		x := NewIndex(1 << 20)
		x.insert(req, &s.Rows[1], sc)
		for _, hash := range req.Prefix[first : first+askedBlocks-1] {
			b := x.bucket(hash)
			for i := range b {
				if w := b[i].Load(); w>>tagShift == tag(hash) {
					b[i].Store(w ^ 1<<tagShift)
				}
			}
		}
		if m := x.lookup(req, s, nil, &seen); len(m) != 1 || m[0].row != 1 || m[0].blocks != n {
			t.Errorf("without blocks %d to %d of %d: %+v", first, first+askedBlocks-2, n, m)
		}
	}
}

// What an endpoint with a small cache has forgotten gives way before what one with a large cache still holds, though more
// has gone by there.
func TestWhatIsForgottenGivesWayFirst(t *testing.T) {
	s := newTable(t, 2, func(i int) pool.Load {
		l := idle()
		l.KVCapacityTokens = []int64{100_000, 1_000_000}[i]
		return l
	}).Load()
	small, large := &s.Rows[0], &s.Rows[1]
	x := NewIndex(minIndexBytes)
	insert := func(hash uint64, r *pool.Row) { // hashes below 1<<tagBits have one bucket
		x.insert(&Request{Target: s.TargetString("m"), Prefix: []uint64{hash}}, r, blockScale{perByte: 0.25, most: 64})
	}
	const forgotten = 7
	for hash := range uint64(bucketWords) {
		if hash+1 == forgotten {
			insert(forgotten, small)
		} else {
			insert(hash+1, large)
		}
	}
	small.Endpoint.TakeIn(200_000)
	large.Endpoint.TakeIn(400_000)
	insert(1<<63, large) // elsewhere: its clock is known
	insert(100, small)
	insert(101, large)
	kept := 0
	for hash := range uint64(bucketWords) {
		if x.holds(hash+1, owner(large)) {
			kept++
		}
	}
	// The second insertion found nothing forgotten any more.
	if kept != bucketWords-2 || !x.holds(100, owner(small)) || !x.holds(101, owner(large)) || x.holds(forgotten, owner(small)) {
		t.Errorf("%d of %d entries that are still held were kept; want all but one", kept, bucketWords-1)
	}
}

func TestSavedPrefixesComeBack(t *testing.T) {
	s := newTable(t, 3, nil).Load()
	x := NewIndex(1 << 20)
	p := newPolicy(t, Config{Index: x})
	var b pool.Booking
	const n = 60
	went := make([]int, n)
	for i := range went {
		went[i] = choose(t, p, prompt(s, text(i, 5000)), s, &b)
		b.End()
	}
	saved := x.Save(s)
	// Another process: other endpoints on other slots, a new table.
	again := newTable(t, 3, nil).Load()
	y := NewIndex(1 << 20)
	if y.Buckets() != x.Buckets() {
		t.Fatal("tables of one size differ")
	}
	restore := func(y *Index, since int64) {
		for i := range again.Rows {
			y.Restore(&again.Rows[i], saved[i], since)
		}
	}
	restore(y, 0)
	back := newPolicy(t, Config{Index: y})
	for i := range went {
		if got := choose(t, back, prompt(again, text(i, 6000)), again, &b); got != went[i] {
			t.Errorf("prompt %d went to %d; its prefix was saved on %d", i, got, went[i])
		}
		b.End()
	}
	// What others put into the caches meanwhile pushed them out.
	z := NewIndex(1 << 20)
	restore(z, 500_000)
	for i := range went {
		if m := z.lookup(prompt(again, text(i, 6000)), again, nil, new(slotSet)); len(m) != 0 {
			t.Errorf("prompt %d is believed to be cached after 500,000 other tokens", i)
		}
	}
	z.Restore(&again.Rows[0], []SavedPrefix{{Place: 1 << 60, Age: 1}, {Place: 0, Age: 1}, {Place: 5, Age: 1 << 30}}, 0)
}

// Faulting the table in changes nothing of what is in it.
func TestFaultIn(t *testing.T) {
	x := NewIndex(1 << 20)
	word := func(i int) *atomic.Uint64 { return &x.buckets[i/bucketWords][i%bucketWords] }
	for i := 0; i < len(x.buckets)*bucketWords; i += 3 {
		word(i).Store(uint64(i))
	}
	x.FaultIn()
	for i := range len(x.buckets) * bucketWords {
		want := uint64(0)
		if i%3 == 0 {
			want = uint64(i)
		}
		if got := word(i).Load(); got != want {
			t.Fatalf("word %d: %d; want %d", i, got, want)
		}
	}
}
