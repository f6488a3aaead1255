package proxy

import (
	"kvgate/openai"
	"kvgate/pool"
	"kvgate/scoring"
)

// FillQuery fills q with what policy's decision needs to know of a request: the facts of its body, and the hashes of its
// prompt where the policy wants them, appended to prefix, which is returned. Explanations and requests both go through
// here, so that they cannot come apart.
func FillQuery(q *scoring.Request, f *openai.Facts, body []byte, target *pool.Target, policy *scoring.Policy, prefix []uint64) []uint64 {
	q.Target = target
	q.PromptBytes = int32(min(f.PromptBytes(), 1<<30))
	if f.PromptIsTokens {
		q.PromptTokens, q.ExactPrompt = int32(min(f.PromptTokens, 1<<30)), true
	}
	if f.HasMaxTokens {
		q.MaxTokens = int32(min(f.MaxTokens, 1<<30))
	}
	q.N = int32(min(f.Choices(), 1<<16))
	q.Stream = f.Stream
	if f.HasPriority {
		q.Priority = int8(min(max(f.Priority, -128), 127))
	}
	q.Session = sessionOf(f)
	if !policy.NeedsPrefix() {
		return prefix
	}
	q.Prefix = hashPrompt(prefix, f, body, target)
	return q.Prefix
}

// hashPrompt appends the hashes of the prompt's blocks, as they stand in the body, to dst.
func hashPrompt(dst []uint64, f *openai.Facts, body []byte, target *pool.Target) []uint64 {
	var parts [openai.MaxPromptRanges][]byte
	ranges := f.Prompts()
	for i, r := range ranges {
		parts[i] = r.Of(body)
	}
	salt := f.CacheSalt
	if len(f.ExtraKey) > 0 { // Slow path: SGLang's second salt
		salt = append(append([]byte(nil), salt...), f.ExtraKey...)
	}
	return scoring.HashPrefix(dst, scoring.PrefixSeed(target, salt), parts[:len(ranges)]...)
}

// sessionOf is the hash of what a body says of the session it belongs to; 0 if it says nothing.
func sessionOf(f *openai.Facts) uint64 {
	switch {
	case len(f.SessionID) > 0:
		return pool.HashName(f.SessionID)
	case len(f.PromptCacheKey) > 0:
		return pool.HashName(f.PromptCacheKey)
	case len(f.User) > 0:
		return pool.HashName(f.User)
	}
	return 0
}
