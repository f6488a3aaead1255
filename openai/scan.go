package openai

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// MaxDepth is the nesting at which a body is refused: 511 open brackets pass,
// 512 don't. Model servers parse with recursive parsers that give up near 1,000.
const MaxDepth = 512

// A fault is what is wrong with a JSON text at some offset.
type fault uint8

const (
	faultNone fault = iota
	faultTruncated
	faultTruncatedString
	faultControl
	faultEscape
	faultUTF8
	faultNumber
	faultLiteral
	faultValue
	faultDepth
	faultAfterValue
	faultKey
	faultColon
	faultTrailingComma
)

var faultMessages = [...]string{
	faultTruncated:       "the body ends in the middle of the JSON; send all of it",
	faultTruncatedString: "the body ends inside a string; send all of it",
	faultControl:         `a raw control character in a string; write it as an escape such as \n`,
	faultEscape:          `an invalid escape in a string; write \\ for a backslash`,
	faultUTF8:            "invalid UTF-8; send the body as UTF-8",
	faultNumber:          "an invalid number; write it as JSON does, such as 10 or 0.5",
	faultLiteral:         "an invalid literal; write true, false or null",
	faultValue:           "something that is no JSON value; want a string, number, object, array, true, false or null",
	faultDepth:           "more than 511 nested arrays and objects; nest less deeply",
	faultAfterValue:      "something else after a value; want ',' or the closing bracket that fits",
	faultKey:             `something else where a key belongs; want a string in double quotes`,
	faultTrailingComma:   "a comma before the closing bracket; remove the comma",
	faultColon:           "something else after a key; want ':'",
}

// Masks for looking at eight bytes at once.
const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// stops marks, in each byte's top bit, the bytes of x that end a plain run
// inside a JSON string: '"', '\\' and control characters. The lowest mark is
// exact; marks above it may be false (a borrow), so only the lowest is used.
//
// x^2 maps '"' to 0x20 and keeps control characters below it, so one compare
// with 0x21 finds both. Bytes above 0x7f never count.
func stops(x uint64) uint64 {
	return (((x ^ 2*ones) - 0x21*ones) | ((x ^ '\\'*ones) - ones)) &^ x & highs
}

// suspicious reports whether stops(x) may find something or a byte is beyond
// ASCII. It is the cheaper test, and false for most words of most texts.
func suspicious(x uint64) bool {
	return (((x^2*ones)-0x21*ones)|((x^'\\'*ones)-ones)|x)&highs != 0
}

// scanString scans a JSON string whose first byte after the quote is b[i]. It
// returns the index of the closing quote, whether there is an escape, and what
// is wrong at the returned index if anything is. It accepts what encoding/json
// accepts, except that invalid UTF-8 is a fault.
func scanString(b []byte, i int) (end int, escaped bool, f fault) {
	start := i
	var high uint64 // top bits of the bytes seen: is there anything beyond ASCII?
	quote := -1     // index of the next quote at or after i, if it is at least i
	for {
		// Fast path: keys, short values and the short runs between escapes, a word at a
		// time.
		if i+32 > len(b) {
			goto tail
		}
		{
			p := b[i : i+32 : i+32]
			x := binary.LittleEndian.Uint64(p)
			if suspicious(x) {
				high |= x
				if m := stops(x); m != 0 {
					i += trailingBytes(m)
					goto stopped
				}
			}
			x = binary.LittleEndian.Uint64(p[8:])
			if suspicious(x) {
				high |= x
				if m := stops(x); m != 0 {
					i += 8 + trailingBytes(m)
					goto stopped
				}
			}
			x = binary.LittleEndian.Uint64(p[16:])
			if suspicious(x) {
				high |= x
				if m := stops(x); m != 0 {
					i += 16 + trailingBytes(m)
					goto stopped
				}
			}
			x = binary.LittleEndian.Uint64(p[24:])
			if suspicious(x) {
				high |= x
				if m := stops(x); m != 0 {
					i += 24 + trailingBytes(m)
					goto stopped
				}
			}
			i += 32
		}
		// Fast path: long runs. Three passes that each look for one thing are faster than
		// one that looks for everything: bytes.IndexByte uses the widest registers there are.
		if quote < i {
			n := bytes.IndexByte(b[i:], '"')
			if n < 0 {
				return len(b), escaped, faultTruncatedString
			}
			quote = i + n
		}
		end = quote
		if n := bytes.IndexByte(b[i:end], '\\'); n >= 0 {
			end = i + n
		}
		if n, h := plainRun(b[i:end]); n < end-i {
			return i + n, escaped, faultControl
		} else {
			high |= h
		}
		i = end
		goto stopped
	tail:
		for i < len(b) && b[i] >= 0x20 && b[i] != '"' && b[i] != '\\' {
			high |= uint64(b[i])
			i++
		}
		if i == len(b) {
			return i, escaped, faultTruncatedString
		}
	stopped:
		switch b[i] {
		case '"':
			if high&highs != 0 {
				if n := validPrefix(b[start:i]); n < i-start {
					return start + n, escaped, faultUTF8
				}
			}
			return i, escaped, faultNone
		case '\\':
			escaped = true
			if i+1 >= len(b) {
				return len(b), escaped, faultTruncatedString
			}
			if isEscape[b[i+1]] {
				i += 2
				continue
			}
			if b[i+1] != 'u' {
				return i, escaped, faultEscape
			}
			for k := i + 2; k < i+6; k++ {
				if k >= len(b) {
					return len(b), escaped, faultTruncatedString
				}
				if unhex(b[k]) < 0 {
					return i, escaped, faultEscape
				}
			}
			i += 6
		default:
			return i, escaped, faultControl
		}
	}
}

// shortString returns the length of a string, with both quotes, if it has at most
// seven bytes of ASCII and no escape, and else 0; b[i] is behind its first quote.
func shortString(b []byte, i int) int {
	if i+8 > len(b) {
		return 0
	}
	x := binary.LittleEndian.Uint64(b[i:])
	n := trailingBytes(stops(x) | x&highs)
	if n == 8 || b[i+n] != '"' {
		return 0
	}
	return n + 2
}

// isEscape holds what may follow a backslash, but for 'u'.
var isEscape = [256]bool{'"': true, '\\': true, '/': true, 'b': true, 'f': true, 'n': true, 'r': true, 't': true}

// plainRun returns the index of the first control character of s, or len(s), and
// a word that has a top bit set if a byte before it has.
func plainRun(s []byte) (int, uint64) {
	if len(s) < 8 {
		return controlIn(s), orBytes(s)
	}
	// If neither a byte nor the byte less 0x20 has its top bit set, it is in
	// 0x20..0x7f: a byte below 0x20 sets it in the difference.
	var any uint64
	t := s
	for len(t) >= 32 {
		x0 := binary.LittleEndian.Uint64(t)
		x1 := binary.LittleEndian.Uint64(t[8:])
		x2 := binary.LittleEndian.Uint64(t[16:])
		x3 := binary.LittleEndian.Uint64(t[24:])
		any |= x0 | (x0 - 0x20*ones) | x1 | (x1 - 0x20*ones) | x2 | (x2 - 0x20*ones) | x3 | (x3 - 0x20*ones)
		t = t[32:]
	}
	for len(t) >= 8 {
		x := binary.LittleEndian.Uint64(t)
		any |= x | (x - 0x20*ones)
		t = t[8:]
	}
	// The last word overlaps with what was seen.
	x := binary.LittleEndian.Uint64(s[len(s)-8:])
	any |= x | (x - 0x20*ones)
	if any&highs == 0 {
		return len(s), 0
	}
	// Slow path: text beyond ASCII, which the caller looks at once more, or an error.
	return mixedRun(s)
}

// mixedRun does what plainRun does, for any text of at least eight bytes.
func mixedRun(s []byte) (int, uint64) {
	var low, high uint64
	for t := s; len(t) >= 8; t = t[8:] {
		x := binary.LittleEndian.Uint64(t)
		low |= (x - 0x20*ones) &^ x
		high |= x
	}
	x := binary.LittleEndian.Uint64(s[len(s)-8:])
	low |= (x - 0x20*ones) &^ x
	high |= x
	if low&highs != 0 {
		return controlIn(s), high
	}
	return len(s), high
}

// controlIn returns the index of the first control character of s, or len(s).
func controlIn(s []byte) int {
	for i, c := range s {
		if c < 0x20 {
			return i
		}
	}
	return len(s)
}

func orBytes(s []byte) (or uint64) {
	for _, c := range s {
		or |= uint64(c)
	}
	return or
}

// validPrefix returns the length of the longest prefix of b that is valid UTF-8.
// Taking two or four letters at once was tried: 1.5 times as fast on Chinese,
// slower on Russian, whose spaces come irregularly.
func validPrefix(b []byte) int {
	if utf8.Valid(b) {
		return len(b)
	}
	n := 0
	for n < len(b) {
		r, size := utf8.DecodeRune(b[n:])
		if r == utf8.RuneError && size == 1 {
			return n
		}
		n += size
	}
	return n
}

// appendUnescapedString appends the text of a valid JSON string, given what stands
// between its quotes. Like encoding/json it writes U+FFFD for half a surrogate
// pair.
func appendUnescapedString(dst, raw []byte) []byte {
	for i := 0; i < len(raw); {
		c := raw[i]
		if c != '\\' {
			dst = append(dst, c)
			i++
			continue
		}
		c = raw[i+1]
		i += 2
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r := hex4(raw[i:])
			i += 4
			if utf16.IsSurrogate(r) {
				pair := rune(utf8.RuneError)
				if i+6 <= len(raw) && raw[i] == '\\' && raw[i+1] == 'u' {
					pair = utf16.DecodeRune(r, hex4(raw[i+2:]))
				}
				if pair != utf8.RuneError {
					i += 6
				}
				r = pair
			}
			dst = utf8.AppendRune(dst, r)
			continue
		}
		dst = append(dst, c)
	}
	return dst
}

// hex4 returns the value of four hexadecimal digits.
func hex4(b []byte) rune {
	return unhex(b[0])<<12 | unhex(b[1])<<8 | unhex(b[2])<<4 | unhex(b[3])
}

// skipSpace returns the index of the first byte at or after i that is no JSON
// white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipNumber scans the number that begins at b[i] and returns the index after it.
func skipNumber(b []byte, i int) (int, fault) {
	if b[i] == '-' {
		i++
	}
	switch {
	case i == len(b):
		return i, faultTruncated
	case b[i] == '0':
		i++
	case b[i] >= '1' && b[i] <= '9':
		i++
		for i < len(b) && b[i]-'0' <= 9 {
			i++
		}
	default:
		return i, faultNumber
	}
	if i < len(b) && b[i] == '.' {
		n := i + 1
		for i = n; i < len(b) && b[i]-'0' <= 9; i++ {
		}
		if i == n {
			return endOr(b, i, faultNumber)
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		n := i
		for i < len(b) && b[i]-'0' <= 9 {
			i++
		}
		if i == n {
			return endOr(b, i, faultNumber)
		}
	}
	return i, faultNone
}

// skipIDs skips numbers from 1 on that are followed by a comma and a digit, as in
// a prompt of token ids, and returns the index of the first number that isn't one.
func skipIDs(b []byte, i int) int {
	for k := i; ; {
		if k >= len(b) || b[k]-'1' > 8 {
			return i
		}
		for k++; k < len(b) && b[k]-'0' <= 9; k++ {
		}
		if k+1 >= len(b) || b[k] != ',' || b[k+1]-'0' > 9 {
			return i
		}
		k++
		i = k
	}
}

// endOr returns faultTruncated at the end of the body, f elsewhere.
func endOr(b []byte, i int, f fault) (int, fault) {
	if i >= len(b) {
		return len(b), faultTruncated
	}
	return i, f
}

// skipLiteral scans true, false or null, whose first byte is b[i].
func skipLiteral(b []byte, i int) (int, fault) {
	want := "null"
	switch b[i] {
	case 't':
		want = "true"
	case 'f':
		want = "false"
	}
	for k := range len(want) {
		if i+k >= len(b) {
			return len(b), faultTruncated
		}
		if b[i+k] != want[k] {
			return i, faultLiteral
		}
	}
	return i + len(want), faultNone
}

// skipValue scans the value that begins at b[i], inside depth open brackets, and
// returns the index after it. It accepts what encoding/json accepts, except for
// invalid UTF-8 and for MaxDepth. It doesn't recurse.
func skipValue(b []byte, i, depth int) (int, fault) {
	if i < len(b) && b[i] == '"' {
		end, _, f := scanString(b, i+1)
		if f == faultNone {
			end++
		}
		return end, f
	}
	var objects [MaxDepth / 64]uint64 // bit d is set when bracket d is '{'
	inObject := false                 // is the innermost bracket?
	base := depth
	var f fault
value:
	if i >= len(b) {
		return i, faultTruncated
	}
	switch c := b[i]; c {
	case '"':
		// Fast path: at most seven bytes of ASCII.
		if n := shortString(b, i+1); n > 0 {
			i += n
			break
		}
		if i, _, f = scanString(b, i+1); f != faultNone {
			return i, f
		}
		i++
	case '{':
		if depth++; depth >= MaxDepth {
			return i, faultDepth
		}
		objects[depth/64] |= 1 << (depth % 64)
		inObject = true
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i < len(b) && b[i] == '}' {
			goto closed
		}
		goto key
	case '[':
		if depth++; depth >= MaxDepth {
			return i, faultDepth
		}
		objects[depth/64] &^= 1 << (depth % 64)
		inObject = false
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i < len(b) && b[i] == ']' {
			goto closed
		}
		goto value
	case 't', 'f', 'n':
		if i, f = skipLiteral(b, i); f != faultNone {
			return i, f
		}
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		if depth > base && !inObject {
			i = skipIDs(b, i)
		}
		if i, f = skipNumber(b, i); f != faultNone {
			return i, f
		}
	case ']':
		if depth > base && !inObject { // the first value is looked at above
			return i, faultTrailingComma
		}
		return i, faultValue
	default:
		return i, faultValue
	}
after:
	if depth == base {
		return i, faultNone
	}
	if i < len(b) && b[i] <= ' ' {
		i = skipSpace(b, i)
	}
	if i >= len(b) {
		return i, faultTruncated
	}
	if b[i] == ',' {
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if inObject {
			goto key
		}
		goto value
	}
	if !(b[i] == '}' && inObject || b[i] == ']' && !inObject) {
		return i, faultAfterValue
	}
closed:
	i++
	depth--
	inObject = objects[depth/64]>>(depth%64)&1 != 0
	goto after
key:
	if i >= len(b) {
		return i, faultTruncated
	}
	if b[i] != '"' {
		return i, keyFault(b[i])
	}
	if n := shortString(b, i+1); n > 0 {
		i += n - 1
	} else if i, _, f = scanString(b, i+1); f != faultNone {
		return i, f
	}
	// Fast path: nothing between key, colon and value.
	if i+2 < len(b) && b[i+1] == ':' && b[i+2] > ' ' {
		i += 2
		goto value
	}
	if i = skipSpace(b, i+1); i >= len(b) {
		return i, faultTruncated
	}
	if b[i] != ':' {
		return i, faultColon
	}
	i = skipSpace(b, i+1)
	goto value
}

// keyFault is what is wrong with c where a key belongs that is not the first.
func keyFault(c byte) fault {
	if c == '}' {
		return faultTrailingComma
	}
	return faultKey
}

// trailingBytes returns the number of bytes below the lowest marked one of a
// word in which each byte's top bit is a mark.
func trailingBytes(m uint64) int { return bits.TrailingZeros64(m) >> 3 }
