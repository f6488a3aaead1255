package openai

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// A Stream reads along a streamed answer: server-sent events of any of the APIs,
// or JSON lines. It is fed the bytes as they pass, cut anywhere, and changes and
// keeps none of them; it needs about two kilobytes of memory whatever the size of an
// event. The zero Stream is ready for use. Not safe for concurrent use; don't
// copy one.
type Stream struct {
	w walker // reads the data of the current event

	state    streamState
	cr       bool // the last byte was '\r': '\n' belongs to it
	space    bool // a space now is the one after the colon
	hasData  bool // the current event has a data line
	begun    bool // the current event's data has begun
	json     bool // … with '{'
	junk     bool // … and is no JSON
	bom      uint8
	nameLen  uint8
	textLen  uint8
	name     [8]byte // field name, while it may still be one we know
	text     [8]byte // beginning of data that is no JSON, to find [DONE]
	event    label   // value of the event field
	finished label   // finish reason

	usage    usageFields
	events   int
	comments int

	// Most events differ from the one before in one text, and in digits. prev holds
	// the data of the last one read, if it was short. If learned is set, it told
	// nothing new, and neither does an event with the same bytes (up to digits), nor one
	// with the same before headEnd and from tailStart on, and a text between them.
	prev      [448]byte
	prevLen   int16
	headEnd   int16 // inside the text, which is a string nobody looks at; prevLen if it isn't known
	tailStart int16 // the text's closing quote
	learned   bool
	typed     bool // its type stands in its data

	terminal    string
	marker      string
	failed      bool
	firstKnown  bool
	firstFailed bool
	firstToken  bool
	beforeToken bool // the error came before the first token
	ended       bool // the server's own mark of the last event was seen
}

type streamState uint8

const (
	atStart    streamState = iota // before the first byte, or in a byte order mark
	atLine                        // at the beginning of a line
	inName                        // in a field's name
	inData                        // in the value of data
	inEvent                       // in the value of event
	inErrorKey                    // in the value of a field called error
	inOther                       // in another field or a comment
	inJSON                        // in JSON lines, or JSON instead of events
)

// Reset makes s ready for the next answer.
func (s *Stream) Reset() {
	// Everything but the buffers.
	s.w.keepID, s.w.keepError = false, false
	s.w.start(objRoot)
	s.state = atStart
	s.cr, s.bom = false, 0
	s.resetEvent()
	s.finished.n = 0
	s.usage = usageFields{}
	s.prevLen, s.learned = 0, false
	s.events, s.comments = 0, 0
	s.terminal, s.marker = "", ""
	s.failed, s.firstKnown, s.firstFailed, s.firstToken, s.beforeToken, s.ended = false, false, false, false, false, false
}

var newline = []byte{'\n'}

// Feed reads the next bytes of the answer. It doesn't allocate.
func (s *Stream) Feed(p []byte) {
	for i := 0; i < len(p); {
		if s.cr {
			s.cr = false
			if p[i] == '\n' {
				i++
				continue
			}
		}
		switch s.state {
		case atStart:
			switch c := p[i]; {
			case int(s.bom) < len(bom) && c == bom[s.bom]:
				s.bom++
				i++
			case s.bom > 0 && int(s.bom) < len(bom):
				// Not a whole byte order mark: the beginning of an odd name.
				s.nameLen = uint8(copy(s.name[:], bom[:s.bom]))
				s.state = inName
			case c == '{':
				s.state = inJSON
				s.w.start(objRoot)
			default:
				s.state = atLine
			}
		case atLine:
			// Fast path: a data line.
			if rest := p[i:]; len(rest) >= 5 && string(rest[:5]) == "data:" {
				i += 5
				s.beginData()
				continue
			}
			if c := p[i]; c == '\n' || c == '\r' {
				s.cr = c == '\r'
				i++
				s.dispatch()
				continue
			}
			if rest := p[i:]; len(rest) >= 6 && string(rest[:6]) == "event:" {
				i += 6
				s.beginEvent()
				continue
			}
			s.nameLen = 0
			s.state = inName
		case inName:
			c := p[i]
			i++
			switch {
			case c == ':':
				s.beginValue()
			case c == '\n' || c == '\r':
				// A field without a colon has an empty value.
				s.beginValue()
				s.endLine(c)
			case int(s.nameLen) < len(s.name):
				s.name[s.nameLen] = c
				s.nameLen++
			}
		default:
			rest := p[i:]
			if s.state == inJSON {
				i += s.jsonLine(rest)
				continue
			}
			n := bytes.IndexByte(rest, '\n')
			ends := n >= 0
			if !ends {
				n = len(rest)
			}
			if k := bytes.IndexByte(rest[:n], '\r'); k >= 0 {
				n, ends = k, true
			}
			if ends && s.state == inData && !s.begun && s.firstToken {
				s.wholeData(rest[:n])
			} else {
				s.value(rest[:n])
			}
			i += n
			if ends {
				s.endLine(p[i])
				i++
			}
		}
	}
}

// Finish takes the end of the answer. A last event that lacks its empty line
// counts if it is [DONE] or whole JSON; one that was cut off doesn't.
func (s *Stream) Finish() {
	if s.hasData && s.terminal == "" && (!s.json && s.isDone() || s.json && s.w.state == lexEnd && !s.junk) {
		s.dispatch()
	}
	s.resetEvent()
	if s.state != atStart && s.state != inJSON {
		s.state = atLine
	}
}

func (s *Stream) resetEvent() {
	s.hasData, s.begun, s.json, s.junk, s.space = false, false, false, false, false
	s.textLen = 0
	s.event.n = 0
}

// beginValue looks at the name of a field, after its colon.
func (s *Stream) beginValue() {
	s.space = true
	switch string(s.name[:s.nameLen]) {
	case "data":
		s.beginData()
	case "event":
		s.beginEvent()
	case "error": // llama.cpp, early 2025
		s.state = inErrorKey
		if !s.hasData && !s.failed {
			s.w.start(objError)
		}
	case "":
		s.comments++
		s.state = inOther
	default:
		s.state = inOther
	}
}

// beginEvent begins an event line.
func (s *Stream) beginEvent() {
	s.event.n = 0
	s.space = true
	s.state = inEvent
}

// beginData begins a data line.
func (s *Stream) beginData() {
	s.state = inData
	s.space = true
	if s.hasData && s.begun {
		// The lines of one event are joined by newlines.
		if s.json {
			s.junk = s.junk || s.w.state == lexInString || s.w.state == lexInKey
			s.w.feed(newline)
		} else {
			s.keepText('\n')
		}
	}
	s.hasData = true
}

// value reads on in the value of a field.
func (s *Stream) value(d []byte) {
	if s.space && len(d) > 0 {
		s.space = false
		if d[0] == ' ' {
			d = d[1:]
		}
	}
	switch s.state {
	case inData:
		s.data(d)
	case inEvent:
		n := copy(s.event.text[s.event.n:], d)
		s.event.n += uint8(n)
	case inErrorKey:
		if !s.hasData && !s.failed {
			s.w.feed(d)
		}
	}
}

// wholeData reads a line of data that is all in one piece, after the first token.
func (s *Stream) wholeData(d []byte) {
	if s.space && len(d) > 0 && d[0] == ' ' {
		d = d[1:]
	}
	s.space = false
	if len(d) == 0 || d[0] != '{' || len(d) > len(s.prev) {
		s.data(d)
		return
	}
	s.begun, s.json = true, true
	s.w.start(objRoot)
	// Fast path: the same as before, but for the text and digits.
	if s.learned && s.sameButText(d) {
		s.w.state = lexEnd
		if s.typed {
			s.w.typ = typeDelta // or typeOther; neither tells anything now
		}
		return
	}
	// Slow path: read it, and learn what the text is by where d departs from prev; nowhere if a server repeats itself.
	s.learned = false
	n := commonPrefix(d, s.prev[:s.prevLen])
	s.prevLen = int16(copy(s.prev[:], d))
	s.w.feed(d[:n])
	inText := !s.w.esc && (s.w.state == lexSkipString || s.w.state == lexInString && s.w.unread())
	rest := d[n:]
	s.after(rest[s.w.feed(rest):])
	if f := &s.w.facts; (inText || n == len(d)) && s.w.state == lexEnd && !s.junk && f.flags&^(sawChoice|sawOutput) == 0 &&
		f.usage.has == 0 && f.finish.n == 0 && f.keepID && (f.typ == typeNone || f.typ == typeOther || f.typ == typeDelta) {
		end := n // of the text; without one, no tail follows
		s.headEnd, s.tailStart = int16(n), int16(n)
		if inText {
			end, _ = stringEnd(d, n)
			s.tailStart = int16(end - 1)
		}
		// No known key or type has a digit, so other digits tell nothing; but a key may be
		// spelled with them.
		s.learned = bytes.IndexByte(d[:n], '\\') < 0 && bytes.IndexByte(d[end:], '\\') < 0
		s.typed = f.typ != typeNone
	}
}

// sameButText reports whether d is prev with another text, if any, and maybe other
// digits.
func (s *Stream) sameButText(d []byte) bool {
	n := commonPrefix(d, s.prev[:s.prevLen])
	if n == len(d) && n == int(s.prevLen) {
		return true
	}
	tail := s.prev[s.tailStart:s.prevLen]
	at := len(d) - len(tail)
	if n < int(s.headEnd) || at < int(s.headEnd) || commonPrefix(d[at:], tail) < len(tail) {
		return false
	}
	// The text must end where the tail begins.
	end, ok := stringEnd(d, int(s.headEnd))
	return ok && end-1 == at
}

// commonPrefix returns the length of the longest common prefix of a and b, where
// any two digits are the same.
func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	for i := 0; i < n; {
		if i+8 <= n {
			x := binary.LittleEndian.Uint64(a[i:]) ^ binary.LittleEndian.Uint64(b[i:])
			if x == 0 {
				i += 8
				continue
			}
			i += bits.TrailingZeros64(x) / 8
		}
		if a[i] != b[i] && (a[i]-'0' > 9 || b[i]-'0' > 9) {
			return i
		}
		i++
	}
	return n
}

// after takes what follows the JSON in an event's data.
func (s *Stream) after(d []byte) {
	s.junk = s.junk || skipSpace(d, 0) < len(d)
}

// data reads on in an event's data.
func (s *Stream) data(d []byte) {
	if !s.begun {
		for len(d) > 0 && (d[0] == ' ' || d[0] == '\t') {
			d = d[1:]
		}
		if len(d) == 0 {
			return
		}
		s.begun = true
		if s.json = d[0] == '{'; s.json {
			s.w.start(objRoot)
		}
	}
	if !s.json {
		for _, c := range d {
			if s.textLen > uint8(len(s.text)) {
				break
			}
			s.keepText(c)
		}
		return
	}
	s.after(d[s.w.feed(d):])
}

// keepText keeps a byte of data that is no JSON. Trailing white space doesn't
// count; once there is too much text, textLen says so.
func (s *Stream) keepText(c byte) {
	switch {
	case int(s.textLen) < len(s.text):
		s.text[s.textLen] = c
		s.textLen++
	case c > ' ':
		s.textLen = uint8(len(s.text)) + 1
	}
}

// isDone reports whether the event's data is [DONE], all of it.
func (s *Stream) isDone() bool {
	return int(s.textLen) <= len(s.text) && string(bytes.TrimRight(s.text[:s.textLen], " \t\n")) == "[DONE]"
}

// endLine ends a field; c is the line end.
func (s *Stream) endLine(c byte) {
	s.cr = c == '\r'
	if s.state == inErrorKey && s.terminal == "" {
		s.fail("field", !s.hasData)
	}
	s.state = atLine
}

// dispatch takes the empty line that ends an event.
func (s *Stream) dispatch() {
	switch {
	case s.terminal != "":
		// Whatever follows the end is passed on, but tells nothing.
	case !s.hasData:
		if string(s.event.get()) == "error" { // Dynamo before its fix: only a comment says what
			s.fail("event", false)
		}
	case !s.json && s.isDone():
		s.terminal = "done"
		s.firstKnown = true
	default:
		s.events++
		if s.json && !s.junk && s.w.state == lexEnd {
			s.commit()
		}
		s.firstKnown = true
	}
	s.resetEvent()
}

// fail records an error that shows by its place, not by its data. If told is set,
// w has read what the error says.
func (s *Stream) fail(marker string, told bool) {
	if s.failed {
		return
	}
	s.marker = marker
	if !told {
		s.w.start(objRoot)
	}
	s.setFailed()
}

// setFailed records that w's facts describe an error.
func (s *Stream) setFailed() {
	s.failed = true
	s.w.keepError = true
	s.beforeToken = !s.firstToken
	if !s.firstKnown {
		s.firstKnown, s.firstFailed = true, true
	}
}

// commit takes what a complete event says.
func (s *Stream) commit() {
	f := &s.w.facts
	if f.typ == typeNone && s.event.n > 0 {
		f.typ = typeOf(s.event.get())
	}
	if f.usage.has != 0 {
		s.usage.merge(&f.usage)
	}
	if f.id.n > 0 {
		f.keepID = true
	}
	if f.flags&sawEnd != 0 {
		s.ended = true
	}
	if f.finish.n > 0 && !isCutOff(s.finished.get()) {
		s.finished = f.finish
	}
	if f.isError() && !s.failed {
		s.setFailed()
	}
	switch f.typ {
	case typeError:
		s.terminal = "error"
	case typeMessageStop:
		s.terminal = "message_stop"
	case typeCompleted:
		s.terminal = "response.completed"
	case typeFailed:
		s.terminal = "response.failed"
	case typeIncomplete:
		s.terminal = "response.incomplete"
	case typeTranscriptDone:
		s.ended = true
	}
	if f.status.n > 0 && (f.typ == typeCompleted || f.typ == typeFailed || f.typ == typeIncomplete) {
		s.finished = f.status
	}
	if !s.firstToken && !f.isError() {
		switch f.typ {
		case typeNone:
			s.firstToken = f.flags&(sawChoice|sawOutput) != 0
		case typeOther:
			s.firstToken = f.flags&sawChoice != 0
		default:
			s.firstToken = true
		}
	}
}

// jsonLine reads on in JSON lines and returns how many bytes it has read.
func (s *Stream) jsonLine(p []byte) int {
	n := s.w.feed(p)
	if s.w.state != lexEnd {
		return n
	}
	if s.w.isError() {
		// JSON instead of a stream: no event at all.
		s.fail("json", true)
	} else {
		s.events++
		s.commit()
	}
	s.firstKnown = true
	s.w.start(objRoot)
	return n
}

// Events returns how many events with data have come, the terminal one of the
// Responses and Messages APIs included, [DONE] not.
func (s *Stream) Events() int { return s.events }

// Comments returns how many comment lines have come.
func (s *Stream) Comments() int { return s.comments }

// FirstToken reports whether an event has come that means that a token was
// generated. A chat's role chunk and message_start mean that; response.created
// and a chunk without choices don't.
func (s *Stream) FirstToken() bool { return s.firstToken }

// FirstEvent reports whether the first event is complete, and if so whether it is
// an error, so that nothing is lost if the request goes elsewhere. Error says
// which one.
func (s *Stream) FirstEvent() (known, failed bool) { return s.firstKnown, s.firstFailed }

// Terminal returns how the stream says that it ends: "done" for [DONE], the name
// of the last event ("response.completed", "response.failed",
// "response.incomplete", "message_stop", "error"), or "" if it hasn't (yet).
func (s *Stream) Terminal() string { return s.terminal }

// FinishReason returns the last finish_reason, stop_reason or response status, or
// the first one that says that the answer was cut off. It allocates.
func (s *Stream) FinishReason() string { return string(s.finished.get()) }

// CutOff reports whether the finish reason means that the server gave up.
func (s *Stream) CutOff() bool { return isCutOff(s.finished.get()) }

// Failed reports whether the stream contains an error.
func (s *Stream) Failed() bool { return s.failed }

// FailedBeforeFirstToken reports whether the stream contains an error that came
// before any token.
func (s *Stream) FailedBeforeFirstToken() bool { return s.failed && s.beforeToken }

// Complete reports whether the answer is whole: it ended as its API demands, and
// neither with an error nor cut off. [DONE] alone isn't success: servers send it
// after an error, too.
func (s *Stream) Complete() bool {
	return (s.terminal != "" || s.ended) && !s.failed && !s.CutOff()
}

// Usage returns the last counts that the stream reported.
func (s *Stream) Usage() Usage { return s.usage.usage() }

// Timings returns the counts in llama.cpp's timings, which come even if usage
// wasn't asked for. They are unknown for other servers.
func (s *Stream) Timings() Usage { return s.usage.timings() }

// ID returns the id of the answer (in the Responses API, the response's), or nil.
// It is valid until the next Reset.
func (s *Stream) ID() []byte {
	if !s.w.keepID {
		return nil
	}
	return s.w.id.get()
}

// MidEvent reports whether the bytes so far end within an event, so that an event
// that is to follow must end that one first.
func (s *Stream) MidEvent() bool {
	switch s.state {
	case atStart:
		return s.bom > 0
	case atLine:
		return s.hasData || s.event.n > 0
	case inJSON:
		return false
	}
	return true
}

// Error returns what the first error says; its Shape is ShapeNone if there is no
// error. It allocates.
func (s *Stream) Error() ErrorInfo {
	if !s.failed {
		return ErrorInfo{}
	}
	e := s.w.facts.errorInfo()
	e.Marker = s.marker
	return e
}
