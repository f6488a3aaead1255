package proxy

import "kvgate/telemetry"

// Usage returns what clients have in use of s, and how much there is.
func (s *Server) Usage() telemetry.Usage {
	u := telemetry.Usage{BodyBytes: s.h.budget.usedBytes(), MaxBodyBytes: s.h.budget.limit}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.lns {
		open, _, _, _ := l.stats()
		u.Connections += open
		u.MaxConnections += int64(s.edge.connections) // each listener counts for itself
	}
	return u
}
