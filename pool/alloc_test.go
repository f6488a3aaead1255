//go:build !race

package pool

import "testing"

func TestHotPathDoesNotAllocate(t *testing.T) {
	tab := testTable(t, 8)
	name := []byte("m")
	var b Booking
	if n := testing.AllocsPerRun(1000, func() {
		s := tab.Load()
		tg := s.Target(name)
		row := &s.Rows[tg.Rows[0]]
		v := row.Version()
		if !row.TryBook(&b, v, Claim{PendingTokens: 1, KVTokens: 1, Adapter: HashName(name), At: 1}) {
			t.Fatal("refused")
		}
		row.Endpoint.Adapters().Use(HashName(name))
		b.FirstToken()
		b.End()
	}); n != 0 {
		t.Errorf("%v allocations per booking; want 0", n)
	}
}
