// Package auth knows who may come in: API keys by their hashes, and tokens (JWT) of an identity provider.
//
// It imports nothing of kvgate's but internal/caller. It never logs a credential.
package auth

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"time"

	"kvgate/internal/caller"
)

// A Key is an API key, without the key itself.
type Key struct {
	ID     string
	Sum    [32]byte // SHA-256 of the key
	Tenant string
	Class  caller.Class
	Models []string  // names and patterns; nil is everything
	End    time.Time // zero: never
}

// A Keyring knows who may come in. It is immutable but for its tokens, and safe for concurrent use.
type Keyring struct {
	keys   map[[32]byte]*entry
	tokens *Tokens          // nil: none are accepted
	now    func() time.Time // never nil
}

type entry struct {
	sum [32]byte
	end time.Time
	who *caller.Caller
}

// New returns a Keyring of the keys and, if it is not nil, of tokens. now is the clock that expiry is checked by; time.Now
// if nil.
func New(keys []Key, tokens *Tokens, now func() time.Time) *Keyring {
	if now == nil {
		now = time.Now
	}
	r := &Keyring{keys: make(map[[32]byte]*entry, len(keys)), tokens: tokens, now: now}
	for i := range keys {
		k := &keys[i]
		who := &caller.Caller{Key: k.ID, Tenant: k.Tenant, Class: k.Class}
		if k.Models != nil {
			who.Models = caller.NewModels(k.Models)
		}
		r.keys[k.Sum] = &entry{sum: k.Sum, end: k.End, who: who}
	}
	return r
}

// Authorize returns who sends requests with this credential, or nil. It does not allocate for a key.
//
// A plain SHA-256 is the right hash here. Slow, salted ones (bcrypt, Argon2) make it expensive to try every password a
// person may have chosen; keys are 256 random bits, of which nobody can try any share worth the name, salted or not, and a
// slow hash would cost every request its time. The hash also makes looking a key up safe: what can be learned from how long
// the map takes is about bits of a hash whose preimage is as hard to find as the key itself. The comparison after it takes
// constant time all the same.
func (r *Keyring) Authorize(credential []byte) *caller.Caller {
	sum := sha256.Sum256(credential)
	if e := r.keys[sum]; e != nil && subtle.ConstantTimeCompare(e.sum[:], sum[:]) == 1 {
		if !e.end.IsZero() && !r.now().Before(e.end) {
			return nil
		}
		return e.who
	}
	if r.tokens != nil && bytes.Count(credential, dot) == 2 {
		return r.tokens.authorize(credential, sum, r.now())
	}
	return nil
}

// Named returns who sends requests with the key of this name, nil if there is none or it has expired. It is for explaining:
// nobody comes in by a name.
func (r *Keyring) Named(id string) *caller.Caller {
	for _, e := range r.keys {
		if e.who.Key == id && (e.end.IsZero() || r.now().Before(e.end)) {
			return e.who
		}
	}
	return nil
}

var dot = []byte{'.'}

// KeyPrefix begins every key that kvgate makes, so that scanners for secrets find them.
const KeyPrefix = "kvg_"

// minKeyBytes is the least length of a key that somebody else has made: Hash relies on keys that nobody can guess.
const minKeyBytes = 32

// NewKey makes a key of 256 random bits.
func NewKey() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return KeyPrefix + base64.RawURLEncoding.EncodeToString(b[:])
}

// Sum is what is kept of a key. ok is false for one that is too short to be safe, or that a header can't hold.
func Sum(key string) (sum [32]byte, ok bool) {
	for i := range len(key) {
		if key[i] <= ' ' || key[i] >= 0x7f {
			return sum, false
		}
	}
	return sha256.Sum256([]byte(key)), len(key) >= minKeyBytes
}
