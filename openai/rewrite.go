package openai

import "bytes"

// A Rewriter changes an answer as its bytes pass, cut anywhere: it puts another name into "model", and takes out the chunk
// with usage that the client did not ask for. All other bytes stay as they are. It holds nothing back, but for events that
// may be that chunk: those until it is known, which is after their first hundred bytes or so.
//
// "model" is looked for where the APIs have it: in the root object, and in its "response" (Responses) and "message"
// (Messages). Make one with Reset. Not safe for concurrent use.
type Rewriter struct {
	model     []byte // quoted; nil: names stay
	events    bool   // server-sent events; otherwise JSON
	dropUsage bool

	line    lineState
	cr      bool // the last byte was '\r'
	dropped bool // … and the end of an event that was taken out
	passed  bool // … and the end of what has been passed on, so that '\n' goes there too
	nameLen int8 // of the field's name, as far as it may be "data"
	hasData bool

	json    jsonState
	root    jsonKey // the key in the root object
	inner   jsonKey // the key in its response or message
	keyLen  int8
	key     [8]byte
	esc     bool
	isKey   bool // the string is a key
	replace bool // the string is the model's name
	depth   int32
	objects uint8 // bit d-1: the container at depth d is an object, for the first eight

	holding bool
	empty   bool // choices is an empty array
	usage   bool // usage is an object
	held    []byte
}

type lineState uint8

const (
	lineStart   lineState = iota
	lineName              // in a field's name
	lineData              // in the value of data
	lineComment           // in a comment
	lineOther             // in anything else
)

type jsonState uint8

const (
	jsonValue  jsonState = iota // a value comes, or the end of an array
	jsonKeyOr                   // a key comes, or the end of an object
	jsonColon                   // after a key
	jsonAfter                   // after a value
	jsonString                  // in a string
	jsonDead                    // this is no JSON
)

type jsonKey uint8

const (
	keyOther jsonKey = iota
	keyModel
	keyNested // response, message
	keyChoices
	keyUsage
)

// maxHeldEvent bounds an event that is held back, in bytes; a longer one is not the chunk with usage.
const maxHeldEvent = 16 << 10

// Reset makes w ready for an answer: of server-sent events, or else of JSON. model is the name to put in, "" to leave
// it. dropUsage takes out the chunk of usage.
func (w *Rewriter) Reset(events bool, model string, dropUsage bool) {
	quoted, held := w.model[:0], w.held[:0]
	if cap(held) > maxHeldEvent {
		held = nil
	}
	*w = Rewriter{events: events, dropUsage: dropUsage && events, held: held, model: quoted}
	if model != "" {
		w.model = appendQuoted(w.model, model)
	}
	w.beginEvent()
}

// Append appends what becomes of the next piece of the answer to dst. dst and p must not share memory.
func (w *Rewriter) Append(dst, p []byte) []byte {
	if !w.events {
		return w.appendJSON(dst, p)
	}
	for i := 0; i < len(p); {
		if w.cr {
			w.cr = false
			dropped, passed := w.dropped, w.passed
			w.dropped, w.passed = false, false
			if p[i] == '\n' {
				if passed {
					dst = append(dst, '\n')
				} else if !dropped {
					dst = w.put(dst, p[i:i+1])
				}
				i++
				continue
			}
		}
		switch w.line {
		case lineStart:
			if c := p[i]; c == '\n' || c == '\r' {
				dst = w.put(dst, p[i:i+1])
				dst = w.endEvent(dst, c == '\r')
				i++
				continue
			}
			w.line, w.nameLen = lineName, 0
		case lineName:
			from := i
			for i < len(p) && w.line == lineName {
				c := p[i]
				switch {
				case c == ':':
					w.line = lineOther
					if w.nameLen == int8(len("data")) {
						w.line, w.hasData = lineData, true
					} else if w.nameLen == 0 {
						w.line = lineComment
					}
				case c == '\n' || c == '\r':
					w.line, w.cr = lineStart, c == '\r'
				case w.nameLen >= 0 && int(w.nameLen) < len("data") && c == "data"[w.nameLen]:
					w.nameLen++
				case w.nameLen <= 0 && w.nameLen > -3 && c == bom[-w.nameLen]: // counts down through a byte order mark
					if w.nameLen--; w.nameLen == -3 {
						w.nameLen = 0
					}
				default:
					w.nameLen = -4
				}
				i++
			}
			dst = w.put(dst, p[from:i])
		default:
			rest := p[i:]
			n := bytes.IndexByte(rest, '\n')
			ends := n >= 0
			if !ends {
				n = len(rest)
			}
			if k := bytes.IndexByte(rest[:n], '\r'); k >= 0 {
				n, ends = k, true
			}
			if w.line == lineData {
				dst = w.appendJSON(dst, rest[:n])
			} else {
				dst = w.put(dst, rest[:n])
			}
			i += n
			if ends {
				dst = w.put(dst, p[i:i+1])
				if w.line == lineComment && !w.hasData { // it is not of the event that may follow
					dst = w.release(dst)
					w.holding, w.passed = w.dropUsage, p[i] == '\r'
				}
				w.line, w.cr = lineStart, p[i] == '\r'
				i++
			}
		}
	}
	return dst
}

// Finish appends what is held back at the end of the answer.
func (w *Rewriter) Finish(dst []byte) []byte { return w.release(dst) }

func (w *Rewriter) beginEvent() {
	w.json, w.depth, w.objects, w.esc, w.replace = jsonValue, 0, 0, false, false
	w.root, w.inner = keyOther, keyOther
	w.hasData, w.empty, w.usage = false, false, false
	w.holding = w.dropUsage
}

// endEvent takes the empty line after an event, which has been put.
func (w *Rewriter) endEvent(dst []byte, cr bool) []byte {
	w.cr = cr
	if w.holding && w.empty && w.usage && w.depth == 0 {
		w.held = w.held[:0]
		w.dropped = cr
	} else {
		dst = w.release(dst)
		w.passed = cr
	}
	w.beginEvent()
	return dst
}

// put appends bytes to dst, or to what is held back.
func (w *Rewriter) put(dst, b []byte) []byte {
	if !w.holding {
		return append(dst, b...)
	}
	if w.held = append(w.held, b...); len(w.held) > maxHeldEvent {
		return w.release(dst)
	}
	return dst
}

func (w *Rewriter) release(dst []byte) []byte {
	w.holding = false
	dst = append(dst, w.held...)
	w.held = w.held[:0]
	return dst
}

// appendJSON reads JSON and passes it on.
func (w *Rewriter) appendJSON(dst, p []byte) []byte {
	from := 0 // p[from:i] is to be passed on
	i := 0
	for i < len(p) {
		c := p[i]
		switch w.json {
		case jsonString:
			end, closed := w.stringEnd(p, i)
			if w.isKey {
				for _, c := range p[i:end] {
					if c != '"' && w.keyLen >= 0 {
						if int(w.keyLen) == len(w.key) {
							w.keyLen = -1
							break
						}
						w.key[w.keyLen] = c
						w.keyLen++
					}
				}
			}
			if i = end; w.replace {
				from = i // the old name goes
			}
			if !closed {
				continue
			}
			w.replace = false
			if w.json = jsonAfter; w.isKey {
				w.json = jsonColon
				w.endKey()
			}
		case jsonValue:
			switch {
			case c == '"':
				w.json, w.isKey = jsonString, false
				if w.model != nil && w.atModel() {
					dst = w.put(dst, p[from:i])
					dst = w.put(dst, w.model)
					from, w.replace = i+1, true
				}
			case c == '{' || c == '[':
				if w.depth == 1 && w.root == keyUsage && w.objects&1 != 0 && c == '{' {
					w.usage = true
				}
				if w.depth < 8 {
					bit := uint8(1) << w.depth
					if w.objects &^= bit; c == '{' {
						w.objects |= bit
					}
				}
				w.depth++
				if c == '{' {
					w.json = jsonKeyOr
				}
			case c == ']':
				if w.depth == 2 && w.root == keyChoices && w.objects&3 == 1 {
					w.empty = true
				}
				w.close()
			case c > ' ':
				if w.depth == 0 && w.events { // [DONE] begins like an array, so this is something else again
					w.json = jsonDead
				} else {
					w.json = jsonAfter // a number or a word, whose other letters are passed over there
				}
			}
			i++
			if w.holding && w.json != jsonString && (w.json == jsonDead || w.notUsage(c)) {
				dst = w.put(dst, p[from:i])
				from = i
				dst = w.release(dst)
			}
		case jsonKeyOr:
			switch c {
			case '"':
				w.json, w.isKey, w.keyLen = jsonString, true, 0
			case '}':
				w.close()
			}
			i++
		case jsonColon:
			if c == ':' {
				w.json = jsonValue
			}
			i++
		case jsonAfter:
			switch c {
			case ',':
				if w.json = jsonValue; w.isObject() {
					w.json = jsonKeyOr
				}
			case '}', ']':
				w.close()
			case ':': // too deep to know keys from values
				w.json = jsonValue
			}
			i++
		default:
			i = len(p)
		}
	}
	return w.put(dst, p[from:])
}

// notUsage reports whether the value that began with c means that the event is not the chunk of usage: an array at its
// root, or a choice.
func (w *Rewriter) notUsage(c byte) bool {
	if w.objects&1 == 0 {
		return w.depth > 0
	}
	return w.root == keyChoices && w.depth == 3 || w.root == keyChoices && w.depth == 2 && c != '[' && c > ' '
}

// atModel reports whether a value here is the model's name.
func (w *Rewriter) atModel() bool {
	switch w.depth {
	case 1:
		return w.root == keyModel && w.objects&1 != 0
	case 2:
		return w.root == keyNested && w.inner == keyModel && w.objects&3 == 3
	}
	return false
}

func (w *Rewriter) isObject() bool {
	switch {
	case w.depth <= 0:
		return false
	case w.depth <= 8:
		return w.objects>>(w.depth-1)&1 != 0
	}
	return false // nobody looks: a key there is read as a value
}

// close ends a container.
func (w *Rewriter) close() {
	w.json = jsonAfter
	if w.depth--; w.depth <= 0 {
		w.depth = 0
		w.json = jsonValue
	}
}

// endKey takes in a key that is complete.
func (w *Rewriter) endKey() {
	k := keyOther
	if w.keyLen > 0 {
		switch string(w.key[:w.keyLen]) {
		case "model":
			k = keyModel
		case "response", "message":
			k = keyNested
		case "choices":
			k = keyChoices
		case "usage":
			k = keyUsage
		}
	}
	switch w.depth {
	case 1:
		w.root = k
	case 2:
		w.inner = k
	}
}

// stringEnd returns the index after the part of a string that begins at i, and whether the string ends there.
func (w *Rewriter) stringEnd(p []byte, i int) (int, bool) {
	for i < len(p) {
		if w.esc {
			w.esc = false
			i++
			continue
		}
		n := bytes.IndexByte(p[i:], '"')
		part := p[i:]
		if n >= 0 {
			part = p[i : i+n]
		}
		if k := bytes.IndexByte(part, '\\'); k >= 0 {
			w.esc = true
			i += k + 1
			continue
		}
		if n < 0 {
			return len(p), false
		}
		return i + n + 1, true
	}
	return i, false
}
