package scoring

import (
	"math/bits"
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/zeebo/xxh3"

	"kvgate/pool"
)

// Blocks get longer towards the end of a prompt: a match that is cut short by part of a block loses at most a sixteenth of
// what it found, and a prompt of 400 KB takes 250 table entries instead of 1,600.
const (
	fineBytes, fineBlocks     = 256, 16 // the first 4 KiB
	middleBytes, middleBlocks = 512, 56 // up to 32 KiB
	coarseBytes               = 2048    // from there on
	maxPrefixBlocks           = 1 << 10 // 2 MB of prompt, some 500,000 tokens
	longestBlock              = coarseBytes
)

// blockBytes is the length of block k.
func blockBytes(k int) int {
	switch {
	case k < fineBlocks:
		return fineBytes
	case k < fineBlocks+middleBlocks:
		return middleBytes
	}
	return coarseBytes
}

// PrefixBytes is how many bytes of a prompt the first n hashes of [HashPrefix] cover.
func PrefixBytes(n int) int {
	bytes := min(n, fineBlocks) * fineBytes
	if n > fineBlocks {
		bytes += min(n-fineBlocks, middleBlocks) * middleBytes
	}
	if n > fineBlocks+middleBlocks {
		bytes += (n - fineBlocks - middleBlocks) * coarseBytes
	}
	return bytes
}

// PrefixSeed is the seed of [HashPrefix] for a model or adapter and the request's cache salt: the same prompt under
// another name, or with another salt, shares nothing.
func PrefixSeed(target *pool.Target, cacheSalt []byte) uint64 {
	if len(cacheSalt) == 0 {
		return target.Hash
	}
	return mix(target.Hash, xxhash.Sum64(cacheSalt))
}

// jointPool lends memory for a block that several parts make up.
var jointPool = sync.Pool{New: func() any { return new([longestBlock]byte) }}

// HashPrefix appends to dst the chained hashes of the prompt's blocks: each depends on all bytes before its end. The
// prompt is the concatenation of parts, which are usually ranges of a request body. Bytes beyond the last whole block are
// left out. It allocates only if dst must grow.
func HashPrefix(dst []uint64, seed uint64, parts ...[]byte) []uint64 {
	// On the stack it would make every stream's goroutine keep twice the stack it needs.
	joint := jointPool.Get().(*[longestBlock]byte)
	defer jointPool.Put(joint)
	h := seed
	block, filled := 0, 0
	want := blockBytes(0)
	for _, b := range parts {
		if filled > 0 {
			n := copy(joint[filled:want], b)
			filled += n
			b = b[n:]
			if filled < want {
				continue
			}
			if block == maxPrefixBlocks {
				return dst
			}
			h = mix(h, xxh3.Hash(joint[:want]))
			dst = append(dst, h)
			block, filled = block+1, 0
			want = blockBytes(block)
		}
		for len(b) >= want {
			if block == maxPrefixBlocks {
				return dst
			}
			h = mix(h, xxh3.Hash(b[:want]))
			dst = append(dst, h)
			b = b[want:]
			block++
			want = blockBytes(block)
		}
		filled = copy(joint[:], b)
	}
	return dst
}

// mix combines a hash with what comes after it; every bit of the result depends on all bits of both (the 128-bit product
// folded, as in wyhash, by Wang Yi).
func mix(h, next uint64) uint64 {
	hi, lo := bits.Mul64(h^0x9e3779b97f4a7c15, next^0xd6e8feb86659fd93)
	h = hi ^ lo
	return h ^ bits.RotateLeft64(next, 29)
}
