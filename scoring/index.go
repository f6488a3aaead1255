package scoring

import "kvgate/pool"

// maxMatches bounds the endpoints that are found for one prompt.
const maxMatches = 16

// A match is an endpoint that holds the start of a prompt.
type match struct {
	row    int32 // in the snapshot
	blocks int   // of Request.Prefix
	tokens int32 // of the prompt
}

type Index struct{}

func (*Index) lookup(req *Request, s *pool.Snapshot, out []match) []match { return out }
func (*Index) insert(req *Request, d *Decision, now pool.Instant)         {}
