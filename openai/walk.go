package openai

import (
	"bytes"
	"encoding/binary"
)

// A walker reads one JSON value that comes in pieces, cut anywhere, and collects
// the few members that matter in its facts. It keeps no more than the token it is
// in, so a value may have any size. It is lenient: what is no JSON makes it stop
// looking, and what nobody asks about is only skipped.
type walker struct {
	facts

	state lex
	m     member    // what the key just read means
	top   int8      // index of the innermost open container in stack
	stack [6]object // containers that matter, outermost first; objUnknown at stack[0] is "no container"
	skip  int32     // open brackets of the container being skipped
	esc   bool      // the piece ended after a backslash in a string
	n     int16     // bytes in tok
	tok   [maxToken]byte
}

// maxToken bounds the strings that are looked at; of longer ones the first
// maxToken bytes are.
const maxToken = 256

// A lex is what a walker expects next.
type lex uint8

const (
	lexValue      lex = iota // a value, or the end of an array
	lexKey                   // a key, or the end of an object
	lexInKey                 // inside a key
	lexColon                 // ':'
	lexAfter                 // ',' or the end of a container
	lexInString              // inside a string
	lexInScalar              // inside a number or a literal
	lexSkip                  // inside a container that doesn't matter
	lexSkipString            // inside a string in there
	lexEnd                   // the value is complete
	lexBad                   // this is no JSON
)

// start makes w ready for a new value; root is what the members of a root object
// mean.
func (w *walker) start(root object) {
	w.facts.reset()
	w.state = lexValue
	w.m = mRoot
	w.top = 0
	w.stack[0] = root
	w.esc = false
	w.n = 0
}

// feed reads p until it ends or the value is complete, and returns how many bytes
// it has read.
func (w *walker) feed(p []byte) int {
	i := 0
	for i < len(p) {
		switch w.state {
		case lexValue:
			switch c := p[i]; {
			case c == '"':
				i++
				w.state = lexInString
			case c == '{' || c == '[':
				i++
				w.open(c)
			case c <= ' ':
				i++
			case c == ']' && w.stack[w.top] == objChoices:
				i++
				w.close()
			case c == ']' || c == ',' || c == ':' || c == '}':
				w.state = lexBad
			default:
				w.state = lexInScalar
			}
		case lexKey:
			switch c := p[i]; {
			case c == '"':
				i++
				w.state = lexInKey
			case c == '}':
				i++
				w.close()
			case c <= ' ' || c == ',':
				i++
			default:
				w.state = lexBad
			}
		case lexInKey:
			raw, end := w.str(p, i)
			if i = end; raw != nil {
				w.m = memberOf(w.stack[w.top], raw)
				w.state = lexColon
				w.n = 0
				if i < len(p) && p[i] == ':' { // Fast path
					i++
					w.state = lexValue
				}
			}
		case lexColon:
			switch c := p[i]; {
			case c == ':':
				w.state = lexValue
			case c > ' ':
				w.state = lexBad
			}
			i++
		case lexAfter:
			switch c := p[i]; {
			case c == ',':
				w.state = lexValue
				if w.stack[w.top] != objChoices {
					w.state = lexKey
				}
			case c == '}' && w.stack[w.top] != objChoices, c == ']' && w.stack[w.top] == objChoices:
				w.close()
			case c > ' ':
				w.state = lexBad
			}
			i++
		case lexInString:
			if w.unread() {
				end, done := w.skipString(p, i)
				if i = end; done {
					w.after()
				}
				continue
			}
			raw, end := w.str(p, i)
			if i = end; raw != nil {
				w.facts.str(w.stack[w.top], w.m, raw)
				w.n = 0
				w.after()
			}
		case lexInScalar:
			end := i
			for end < len(p) && isScalar(p[end]) {
				end++
			}
			if w.m != mNone {
				if end < len(p) && w.n == 0 {
					w.facts.scalar(w.stack[w.top], w.m, p[i:end])
				} else {
					w.keep(p[i:end])
					if end < len(p) {
						w.facts.scalar(w.stack[w.top], w.m, w.tok[:w.n])
						w.n = 0
					}
				}
			}
			if i = end; i < len(p) {
				w.after()
			}
		case lexSkip:
			i = w.skipContainer(p, i)
		case lexSkipString:
			end, done := w.skipString(p, i)
			if i = end; done {
				w.state = lexSkip
			}
		case lexEnd:
			return i
		case lexBad:
			return len(p)
		}
	}
	return i
}

// isScalar reports whether c belongs to a number or literal.
func isScalar(c byte) bool {
	return c > ' ' && c != ',' && c != '}' && c != ']' && c != '"' && c != ':' && c != '{' && c != '['
}

// unread reports whether nobody looks at the string that w is in.
func (w *walker) unread() bool { return w.m == mNone || w.m == mDelta }

// after ends a value that is no container.
func (w *walker) after() {
	w.state = lexAfter
	if w.top == 0 {
		w.state = lexEnd
	}
}

// open enters the container that c opens.
func (w *walker) open(c byte) {
	child := w.facts.open(w.stack[w.top], w.m, c)
	if child == objUnknown || int(w.top)+1 == len(w.stack) {
		w.skip = 1
		w.state = lexSkip
		return
	}
	w.top++
	w.stack[w.top] = child
	w.state = lexKey
	if child == objChoices {
		w.state = lexValue
		w.m = mChoice
	}
}

// close leaves the innermost container that matters.
func (w *walker) close() {
	if w.top == 0 {
		w.state = lexBad
		return
	}
	w.top--
	if w.stack[w.top] == objChoices && w.top > 0 {
		w.m = mChoice
	}
	w.after()
}

// str reads on in a string that is looked at. If it ends in p, str returns what
// stands between its quotes, unescaped and cut to maxToken (never nil), and the
// index after the closing quote; if not, nil and len(p).
func (w *walker) str(p []byte, i int) ([]byte, int) {
	end, escaped := i, false
	if w.esc {
		w.esc = false
		end++
	}
	for {
		end = runEnd(p, end)
		if end >= len(p) {
			w.keep(p[i:])
			return nil, len(p)
		}
		if p[end] == '"' {
			break
		}
		// A backslash: what follows it doesn't end the string.
		escaped = true
		if end += 2; end > len(p) {
			w.esc = true
			w.keep(p[i:])
			return nil, len(p)
		}
	}
	// Fast path: the whole string is in p.
	raw := p[i:end:end]
	if w.n > 0 {
		w.keep(raw)
		raw = w.tok[:w.n]
		escaped = bytes.IndexByte(raw, '\\') >= 0
	}
	if len(raw) > maxToken {
		raw = raw[:maxToken]
	}
	if escaped {
		n := copy(w.tok[:], raw)
		raw = unescapeLenient(w.tok[:n])
	}
	if raw == nil {
		raw = w.tok[:0]
	}
	return raw, end + 1
}

// keep appends s to tok, as far as it fits.
func (w *walker) keep(s []byte) { w.n += int16(copy(w.tok[w.n:], s)) }

// skipString reads on in a string nobody looks at, and reports whether it ended.
func (w *walker) skipString(p []byte, i int) (int, bool) {
	if w.esc {
		w.esc = false
		i++
	}
	i, ended := stringEnd(p, i)
	w.esc = !ended && i > len(p)
	return min(i, len(p)), ended
}

// stringEnd returns the index behind the closing quote of a string that p[i] is
// in, and true. If p doesn't reach that far it returns false, and len(p), or
// len(p)+1 if p ends in a backslash that escapes what follows.
func stringEnd(p []byte, i int) (int, bool) {
	for {
		i = runEnd(p, i)
		if i >= len(p) {
			return i, false
		}
		if p[i] == '"' {
			return i + 1, true
		}
		if i += 2; i > len(p) {
			return i, false
		}
	}
}

// runEnd returns the index of the first '"' or '\\' at or after i, or len(p).
func runEnd(p []byte, i int) int {
	for i+8 <= len(p) {
		x := binary.LittleEndian.Uint64(p[i:])
		quote, slash := x^'"'*ones, x^'\\'*ones
		if m := ((quote-ones)&^quote | (slash-ones)&^slash) & highs; m != 0 {
			return i + trailingBytes(m)
		}
		i += 8
	}
	for i < len(p) && p[i] != '"' && p[i] != '\\' {
		i++
	}
	return i
}

// skipContainer reads on in a container nobody looks at, up to its end or to a
// string in it that p doesn't end.
func (w *walker) skipContainer(p []byte, i int) int {
	for {
		i = structuralEnd(p, i)
		if i >= len(p) {
			return len(p)
		}
		switch p[i] {
		case '"':
			end, done := w.skipString(p, i+1)
			if !done {
				w.state = lexSkipString
				return len(p)
			}
			i = end
			continue
		case '{', '[':
			w.skip++
		case '}', ']':
			if w.skip--; w.skip == 0 {
				w.after()
				return i + 1
			}
		}
		i++
	}
}

// structuralEnd returns the index of the first '"', '{', '}', '[' or ']' at or
// after i, of some other bytes that are rare outside strings, or len(p).
func structuralEnd(p []byte, i int) int {
	for i+8 <= len(p) {
		x := binary.LittleEndian.Uint64(p[i:])
		// All four brackets, and 'Y', '_', 'y' and DEL, are 0x7f once these bits are set.
		quote, bracket := x^'"'*ones, (x|0x26*ones)^0x7f*ones
		if m := ((quote-ones)&^quote | (bracket-ones)&^bracket) & highs; m != 0 {
			return i + trailingBytes(m)
		}
		i += 8
	}
	for i < len(p) && p[i] != '"' && p[i]|0x26 != 0x7f {
		i++
	}
	return i
}

// unescapeLenient undoes the escapes in s, in place, up to the first that is
// wrong or cut off.
func unescapeLenient(s []byte) []byte {
	n := 0
	for n < len(s) {
		if s[n] != '\\' {
			n++
			continue
		}
		if n+1 == len(s) {
			break
		}
		if s[n+1] != 'u' {
			n += 2
			continue
		}
		if n+6 > len(s) || unhex(s[n+2])|unhex(s[n+3])|unhex(s[n+4])|unhex(s[n+5]) < 0 {
			break
		}
		n += 6
	}
	// What is written is never longer than what was read.
	return appendUnescapedString(s[:0], s[:n])
}
