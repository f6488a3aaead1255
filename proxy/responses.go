package proxy

import (
	"sync"

	"github.com/cespare/xxhash/v2"

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
	byID map[uint64]*pool.Endpoint
	ring []uint64 // ids in the order they came; the oldest makes room
	next int
}

func (s *storedResponses) init() {
	for i := range s.shards {
		s.shards[i].byID = map[uint64]*pool.Endpoint{}
	}
}

func (s *storedResponses) shard(id []byte) (*storedShard, uint64) {
	h := xxhash.Sum64(id)
	return &s.shards[h%storedShards], h
}

// add notes that e made the response called id.
func (s *storedResponses) add(id []byte, e *pool.Endpoint) {
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
	sh.byID[h] = e
}

// find returns the endpoint that made the response called id, nil if that is not known.
func (s *storedResponses) find(id []byte) *pool.Endpoint {
	sh, h := s.shard(id)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.byID[h]
}

// pin finds the endpoint that made the response which the request goes on from, if that is known and still there.
func (x *exchange) pin() {
	if len(x.peek.PreviousResponseID) == 0 {
		return
	}
	if e := x.h.stored.find(x.peek.PreviousResponseID); e != nil && inTable(x.snapshot, e) && e.Pool == x.pool.Name {
		x.pinned = e
	}
}

// resolveStored finds where a request about a stored response goes: where it was made, or to the only endpoint there is.
func (x *exchange) resolveStored() *failure {
	x.snapshot = x.h.table.Load()
	e := x.h.stored.find(x.route.ID)
	if e == nil && len(x.snapshot.Rows) == 1 {
		e = x.snapshot.Rows[0].Endpoint
	}
	if e == nil || !inTable(x.snapshot, e) {
		return &failure{outcome: NotFound, param: "response_id", message: "there is no response " + string(x.route.ID) + " here, or the model server that made it is gone"}
	}
	x.pinned = e
	return x.usePool(e.Pool)
}

func inTable(s *pool.Snapshot, e *pool.Endpoint) bool {
	for i := range s.Rows {
		if s.Rows[i].Endpoint == e {
			return true
		}
	}
	return false
}
