package scoring

import (
	"strconv"
	"testing"

	"kvgate/pool"
)

// engines is the load of a vLLM server with n data-parallel engines.
func engines(n int, dialect string) pool.Load {
	l := idle()
	l.Dialect = dialect
	for i := range n {
		l.Engines = append(l.Engines, pool.EngineLoad{ID: strconv.Itoa(i), Known: pool.KnowsRunning})
	}
	return l
}

func TestRanksShareTheWorkAndKeepPrefixes(t *testing.T) {
	s := newTable(t, 2, func(int) pool.Load { return engines(4, "vllm") }).Load()
	p := newPolicy(t, Config{Index: NewIndex(1 << 20)})
	type place struct {
		row  int32
		rank int32
	}
	const n = 64
	went := make([]place, n)
	bookings := make([]pool.Booking, n)
	counts := make(map[place]int)
	send := func(i, bytes int, b *pool.Booking) place {
		d, err := p.Choose(prompt(s, text(i, bytes)), s, second0+1, b)
		if err != nil {
			t.Fatal(err)
		}
		return place{s.RowOf(d.Endpoint.Slot), d.Rank}
	}
	for i := range went {
		went[i] = send(i, 6000, &bookings[i])
		counts[went[i]]++
	}
	// Eight engines, 64 equal requests that are all pending.
	for pl, c := range counts {
		if pl.rank < 1 || pl.rank > 4 || c < 6 || c > 10 {
			t.Errorf("engine %d of endpoint %d has %d requests; want about 8", pl.rank, pl.row, c)
		}
	}
	for i := range bookings {
		bookings[i].FirstToken()
		bookings[i].End()
	}
	for i := range s.Rows {
		ranks := s.Rows[i].Endpoint.Ranks()
		for r := range ranks.Len() {
			if b := ranks.Booked(r); b != (pool.Booked{}) {
				t.Errorf("endpoint %d, engine %d: %+v is booked after the end of all", i, r, b)
			}
		}
	}
	var b pool.Booking
	for i := range went {
		if got := send(i, 9000, &b); got != went[i] {
			t.Errorf("conversation %d went to %+v and then to %+v", i, went[i], got)
		}
		b.End()
	}
}

func TestRanksAreNamedWhereServersUnderstand(t *testing.T) {
	f := func(what string, l pool.Load, want bool) {
		t.Helper()
		s := newTable(t, 1, func(int) pool.Load { return l }).Load()
		p := newPolicy(t, Config{})
		var b pool.Booking
		d, err := p.Choose(request(s, "m", 1000), s, second0+1, &b)
		if err != nil {
			t.Fatal(err)
		}
		if (d.Rank > 0) != want {
			t.Errorf("%s: rank %d; want one: %v", what, d.Rank, want)
		}
	}
	f("one engine", engines(1, "vllm"), false)
	f("vLLM", engines(2, "vllm"), true)
	f("SGLang", engines(8, "sglang"), true)
	f("TensorRT-LLM", engines(2, "trtllm"), false)
	l := engines(2, "vllm")
	l.Engines[0].ID, l.Engines[1].ID = "4", "5" // hybrid balancing: these are the ranks of the whole deployment
	f("global ranks", l, false)
}
