// Package record writes what is worth knowing of finished requests, and nothing of what they said, into files that kvgate
// replay reads: when they came, how long they were, which of them began alike, and how they were served.
//
// Prompts are not in a record, nor hashes that could be guessed from a prompt: the ids of a prompt's blocks and of sessions
// are encrypted with a key that is made at random when a recorder starts and is never written anywhere. Equal beginnings have
// equal ids as long as that recorder runs, across the files that it rotates, and nobody can tell of what.
//
// It imports nothing of kvgate's but lines, scoring and telemetry.
package record

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"time"
)

// Version is of the format. A reader refuses files of a newer one.
const Version = 1

// maxBlocks bounds how many of a prompt's blocks are recorded, the first ones: they cover 400 KB. What comes after them
// counts as shared with nobody.
const maxBlocks = 256

// idBytes is how long a block's id is: among ten million different blocks some pair is alike with a chance of one in six, and
// nothing comes of it but one prefix that looks shared.
const idBytes = 6

// A Header begins a file, and stands again where a recorder went on with one. Lines after it have ids that can be compared
// with those of all lines of the same series.
type Header struct {
	Version int       `json:"kvgate_record"`
	Series  string    `json:"series"`
	Started time.Time `json:"started"`
	Kvgate  string    `json:"kvgate,omitempty"` // the version of the program
	// Sample is the share of the windows of time that are recorded, 0..1, and WindowSeconds their length. 1 is everything.
	Sample        float64 `json:"sample,omitempty"`
	WindowSeconds float64 `json:"window_seconds,omitempty"`
}

// A Fleet is what served a pool from there on. Zero fields are not known.
type Fleet struct {
	Pool         string `json:"pool"`
	Policy       string `json:"policy,omitempty"`
	Endpoints    int    `json:"endpoints"`
	KVTokens     int64  `json:"kv_tokens,omitempty"`     // KV cache of an endpoint, the median
	AdapterSlots int    `json:"adapter_slots,omitempty"` // adapters that fit into a batch, the median
}

// A Line is one request. Zero fields are left out of the file.
type Line struct {
	At      float64 `json:"at"` // when the request's head had been read, Unix time in seconds
	Pool    string  `json:"pool"`
	Model   string  `json:"model"` // as the endpoints call it
	Adapter bool    `json:"adapter,omitempty"`
	API     string  `json:"api,omitempty"`
	// InputTokens are those that the server counted, or an estimate.
	InputTokens  int64 `json:"in,omitempty"`
	Estimated    bool  `json:"estimated,omitempty"` // InputTokens are, and OutputTokens are not known
	CachedTokens int64 `json:"cached,omitempty"`    // of InputTokens, from the prefix cache; -1: the server didn't tell
	OutputTokens int64 `json:"out,omitempty"`
	MaxTokens    int64 `json:"max,omitempty"` // that the request allowed
	Stream       bool  `json:"stream,omitempty"`
	PromptBytes  int64 `json:"bytes,omitempty"`
	// Blocks are the ids of the prompt's first blocks, idBytes bytes each; scoring.PrefixBytes says how long those are. Two
	// prompts with the same id are alike up to the end of that block.
	Blocks   []byte `json:"blocks,omitempty"`
	Session  string `json:"session,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	Endpoint string `json:"endpoint,omitempty"` // an id that says no more than that it is the same one

	QueueSeconds    float64 `json:"queue,omitempty"` // waited for admission
	TTFTSeconds     float64 `json:"ttft,omitempty"`  // 0: not streamed, or nothing came
	DurationSeconds float64 `json:"duration,omitempty"`
	Status          int     `json:"status"`
	Outcome         string  `json:"outcome"`
}

// Time is when the request came.
func (l *Line) Time() time.Time {
	s, f := math.Modf(l.At)
	return time.Unix(int64(s), int64(f*1e9)).UTC()
}

// BlockIDs appends the ids of l's blocks to dst.
func (l *Line) BlockIDs(dst []uint64) []uint64 {
	for b := l.Blocks; len(b) >= idBytes; b = b[idBytes:] {
		var id [8]byte
		copy(id[2:], b[:idBytes])
		dst = append(dst, binary.BigEndian.Uint64(id[:]))
	}
	return dst
}

// Check reports what of l cannot be.
func (l *Line) Check() error {
	const most = 1 << 24 // tokens: more than any request has
	switch {
	case l.At <= 0 || l.At > 8e9: // the year 2223, and as long a time as a Duration holds
		return fmt.Errorf(`"at" is %g; want seconds of Unix time`, l.At)
	case l.Pool == "":
		return fmt.Errorf(`no "pool"`)
	case l.InputTokens < 0 || l.InputTokens > most || l.OutputTokens < 0 || l.OutputTokens > most || l.MaxTokens < 0 || l.PromptBytes < 0 || l.PromptBytes > 1<<40 || l.CachedTokens < -1:
		return fmt.Errorf("%d tokens in, %d out, %d allowed, %d bytes; want none of them negative, and 2²⁴ tokens at most", l.InputTokens, l.OutputTokens, l.MaxTokens, l.PromptBytes)
	case l.TTFTSeconds < 0 || l.DurationSeconds < 0 || l.QueueSeconds < 0 || l.TTFTSeconds > 1e7 || l.DurationSeconds > 1e7:
		return fmt.Errorf("%g s to the first token, %g s in all; want neither negative nor above 10⁷", l.TTFTSeconds, l.DurationSeconds)
	case len(l.Blocks)%idBytes != 0:
		return fmt.Errorf(`"blocks" are %d bytes; want a multiple of %d`, len(l.Blocks), idBytes)
	}
	return nil
}

// A veil makes ids that say nothing of what they are of.
type veil struct{ cipher.Block }

func newVeil() (veil, error) {
	var key [16]byte
	if _, err := rand.Read(key[:]); err != nil {
		return veil{}, err
	}
	b, err := aes.NewCipher(key[:])
	return veil{b}, err
}

// What ids are of: the same hash has another id as something else.
const (
	ofBlock = iota
	ofSession
	ofEndpoint
)

// of writes the id of hash into dst, which has room for 16 bytes and is not in use elsewhere.
func (v veil) of(dst []byte, what byte, hash uint64) {
	clear(dst[:16])
	binary.BigEndian.PutUint64(dst, hash)
	dst[15] = what
	v.Encrypt(dst[:16], dst[:16])
}

// text is the id of hash in n bytes, as hexadecimal digits.
func (v veil) text(what byte, hash uint64, n int) string {
	var b [16]byte
	v.of(b[:], what, hash)
	return hex.EncodeToString(b[:n])
}

// sampled reports whether what comes at a time is recorded: whole windows are, so that what is recorded is as dense, and
// shares as much, as what came.
func sampled(at time.Time, window time.Duration, share float64) bool {
	if share >= 1 {
		return true
	}
	n := float64(at.UnixNano() / int64(window))
	return math.Floor((n+1)*share) > math.Floor(n*share)
}
