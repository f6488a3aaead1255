package config

import (
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// suggest returns the candidate that a mistyped word most likely meant, or "".
func suggest(word string, candidates []string) string {
	word = snakeCase(word)
	best, least := "", max(1, min(len(word), 24)/3)+1
	for _, c := range candidates {
		if d := distance(word, c, least); d < least {
			best, least = c, d
		}
	}
	return best
}

// meant maps what scorers and policies are called elsewhere, in snake case and without "_scorer", to what they are here.
var meant = map[string]string{
	"queue_depth": "queue", "queue_size": "queue", "queue_length": "queue", "waiting": "queue", "waiting_requests": "queue",
	"kv_cache_usage": "kv_cache", "gpu_cache_usage": "kv_cache", "cache_utilization": "kv_cache", "free_kv": "kv_headroom",
	"prefix_cache": "prefix", "prefix_aware": "prefix", "cache_aware": "prefix", "precise_prefix_cache": "prefix",
	"running_queue": "running_requests", "running_queue_size": "running_requests", "running": "running_requests",
	"active_request": "running_requests", "active_requests": "running_requests", "load_aware": "running_requests",
	"lora": "lora_affinity", "adapter": "lora_affinity", "adapter_affinity": "lora_affinity",
	"latency": "predicted_latency", "ttft": "predicted_latency", "session_affinity": "session", "sticky": "session",
	"leastconn": "least_requests", "least_conn": "least_requests", "least_connections": "least_requests", "least_loaded": "least_requests",
	"least_outstanding_requests": "least_requests", "least_request": "least_requests",
	"p2c": "power_of_two", "pow2": "power_of_two", "power_of_two_choices": "power_of_two", "rr": "round_robin",
	"chash": "consistent_hash", "ring_hash": "consistent_hash", "maglev": "consistent_hash", "default": "auto",
}

// hintFor is what to write instead of word: the likely candidate, or all of them.
func hintFor(word, what string, candidates []string) string {
	s := meant[strings.TrimSuffix(snakeCase(word), "_scorer")]
	if !slices.Contains(candidates, s) {
		s = suggest(word, candidates)
	}
	if s != "" {
		return "did you mean " + strconv.Quote(s) + "?"
	}
	known := slices.Sorted(slices.Values(candidates))
	return "known " + what + ": " + strings.Join(known, ", ")
}

// distance counts the insertions, deletions, substitutions and swaps of neighbours that turn a into b (optimal string
// alignment). Anything from limit up may be returned as limit.
func distance(a, b string, limit int) int {
	if abs(len(a)-len(b)) >= limit {
		return limit
	}
	before, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], before[j-2]+1)
			}
		}
		before, prev, cur = prev, cur, before
	}
	return min(prev[len(b)], limit)
}

func abs(n int) int { return max(n, -n) }

// snakeCase turns kvCache, KVCache and kv-cache into kv_cache.
func snakeCase(s string) string {
	var b strings.Builder
	rs := []rune(s)
	for i, r := range rs {
		if unicode.IsUpper(r) {
			startsWord := i > 0 && rs[i-1] != '_' && rs[i-1] != '-' &&
				(!unicode.IsUpper(rs[i-1]) || i+1 < len(rs) && unicode.IsLower(rs[i+1]))
			if startsWord {
				b.WriteByte('_')
			}
			r = unicode.ToLower(r)
		}
		if r == '-' {
			r = '_'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// Suggest returns the candidate that is spelled most like name, in any case; "" if none is near.
func Suggest(name string, candidates []string) string {
	best, least := "", max(2, len(name)/3)+1
	for _, c := range candidates {
		if d := distance(strings.ToLower(name), strings.ToLower(c), least); d < least {
			best, least = c, d
		}
	}
	return best
}
