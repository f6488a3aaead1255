package proxy

import (
	"fmt"
	"strings"
	"testing"

	"kvgate/scoring"
)

// The turns of a conversation go to the endpoint that holds it, whichever API and whatever else differs in the body; other
// conversations, and the same one under another cache salt, are spread.
func TestConversationsStayWhereTheyAreCached(t *testing.T) {
	var mocks []*mock
	for range 4 {
		mocks = append(mocks, newMock(t, func(c *call) {
			// Not streamed: then no endpoint's speed is learned from how busy the machine is.
			c.json(200, fmt.Sprintf(`{"id":"x","choices":[{"message":{"content":"one"}}],"usage":{"prompt_tokens":%d,"completion_tokens":3}}`, len(c.body)/4))
		}))
	}
	policy, err := scoring.New(scoring.Config{Index: scoring.NewIndex(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, mocks, withPool(func(o *PoolOptions) { o.Policy = policy }))
	served := func(body string) int {
		t.Helper()
		var before [4]int64
		for i, m := range mocks {
			before[i] = m.requests.Load()
		}
		if r := g.do(body); r.StatusCode != 200 {
			t.Fatalf("status %d: %s", r.StatusCode, r.body)
		}
		g.booked(0)
		for i, m := range mocks {
			if m.requests.Load() > before[i] {
				return i
			}
		}
		t.Fatal("nobody served it")
		return -1
	}
	turn := func(conversation, n int) string {
		var b strings.Builder
		fmt.Fprintf(&b, `{"model":"m","temperature":0.%d,"messages":[`, n)
		for i := range n + 1 {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, `{"role":"user","content":"%s"}`, strings.Repeat(fmt.Sprintf("conversation %d turn %d ", conversation, i), 100))
		}
		b.WriteString("]}")
		return b.String()
	}
	used := map[int]bool{}
	for conversation := range 12 {
		first := served(turn(conversation, 0))
		used[first] = true
		for n := 1; n < 5; n++ {
			if at := served(turn(conversation, n)); at != first {
				t.Errorf("conversation %d: turn %d went to endpoint %d; its beginning is on %d", conversation, n, at, first)
			}
		}
	}
	if len(used) < 3 {
		t.Errorf("12 conversations used %d of 4 idle endpoints", len(used))
	}
	// With salts nothing is shared, so twelve tenants' equal prompts are not all sent to one endpoint.
	used = map[int]bool{}
	for tenant := range 12 {
		used[served(strings.Replace(turn(99, 1), "{", fmt.Sprintf(`{"cache_salt":"tenant %d",`, tenant), 1))] = true
	}
	if len(used) < 2 {
		t.Error("a prompt under twelve cache salts always went to one endpoint")
	}
}
