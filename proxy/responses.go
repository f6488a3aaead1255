package proxy

import (
	"strconv"
	"sync"

	"github.com/cespare/xxhash/v2"

	"kvgate/internal/caller"
	"kvgate/pool"
)

// storedResponses remembers which endpoint made a response of the Responses API: its state is in that process's memory,
// so whatever refers to it must go there. It holds the latest storedPerShard×storedShards ids and is safe for concurrent use.
type storedResponses struct {
	shards [storedShards]storedShard
}

const (
	storedShards   = 16
	storedPerShard = 4096
)

type storedShard struct {
	mu   sync.Mutex
	byID map[uint64]storedResponse
	ring []uint64 // ids in the order they came; the oldest makes room
	next int
}

// A storedResponse is where a response was made, by whom and with what.
type storedResponse struct {
	endpoint *pool.Endpoint
	tenant   string
	target   *pool.Target // as it was then
}

// seenBy reports whether c may know of the response: it is its tenant's, and of a model that it may use.
func (r *storedResponse) seenBy(c *caller.Caller) bool {
	return c == nil || r.target != nil && r.tenant == c.Tenant && c.May(r.target)
}

func (s *storedResponses) init() {
	for i := range s.shards {
		s.shards[i].byID = map[uint64]storedResponse{}
	}
}

func (s *storedResponses) shard(id []byte) (*storedShard, uint64) {
	h := xxhash.Sum64(id)
	return &s.shards[h%storedShards], h
}

// add notes how the response called id was made.
func (s *storedResponses) add(id []byte, r storedResponse) {
	sh, h := s.shard(id)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if _, known := sh.byID[h]; !known {
		if len(sh.ring) < storedPerShard {
			sh.ring = append(sh.ring, h)
		} else {
			delete(sh.byID, sh.ring[sh.next])
			sh.ring[sh.next] = h
			sh.next = (sh.next + 1) % storedPerShard
		}
	}
	sh.byID[h] = r
}

// find returns how the response called id was made; its endpoint is nil if that is not known.
func (s *storedResponses) find(id []byte) storedResponse {
	sh, h := s.shard(id)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.byID[h]
}

// pin finds the endpoint that made the response which the request goes on from, if that is known and still there. With
// authentication on, nobody goes on from a response that is not known to be its own: the server would tell what is in it.
func (x *exchange) pin() *failure {
	id := x.peek.PreviousResponseID
	if len(id) == 0 {
		return nil
	}
	r := x.h.stored.find(id)
	if !r.seenBy(x.caller) {
		return noResponse(id, "previous_response_id")
	}
	if r.endpoint != nil && inTable(x.snapshot, r.endpoint) && r.endpoint.Pool == x.pool.Name {
		x.pinned = r.endpoint
	}
	return nil
}

func noResponse(id []byte, param string) *failure {
	return &failure{outcome: NotFound, param: param, message: "there is no response " + strconv.Quote(cut(string(id), 200)) + " here, or the model server that made it is gone"}
}

// resolveStored finds where a request about a stored response goes: where it was made, or with authentication off to the
// only endpoint there is.
func (x *exchange) resolveStored() *failure {
	x.snapshot = x.h.table.Load()
	r := x.h.stored.find(x.route.ID)
	if r.endpoint == nil && x.caller == nil && len(x.snapshot.Rows) == 1 {
		r.endpoint = x.snapshot.Rows[0].Endpoint
	}
	if r.endpoint == nil || !r.seenBy(x.caller) || !inTable(x.snapshot, r.endpoint) {
		return noResponse(x.route.ID, "response_id")
	}
	x.pinned = r.endpoint
	return x.usePool(r.endpoint.Pool)
}

func inTable(s *pool.Snapshot, e *pool.Endpoint) bool {
	for i := range s.Rows {
		if s.Rows[i].Endpoint == e {
			return true
		}
	}
	return false
}
