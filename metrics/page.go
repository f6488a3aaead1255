package metrics

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"sync"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// A wanted set is the families that a page is scanned for.
type wanted struct {
	ids   map[string]int // family to its index in names
	names []string
}

func newWanted(names ...string) *wanted {
	w := &wanted{ids: make(map[string]int, len(names))}
	for _, n := range names {
		w.add(n)
	}
	return w
}

func (w *wanted) add(name string) {
	if _, ok := w.ids[name]; !ok && name != "" {
		w.ids[name] = len(w.names)
		w.names = append(w.names, name)
	}
}

type label struct{ name, value string }

// A series is a family with its labels, as one line of a page names it.
type series struct {
	text     string // as the page writes it
	family   int
	labels   []label
	readable bool // the parser accepted it
	page     int  // the page that showed it last

	// What the labels mean to the dialect that reads the page; see Dialect.identify.
	model, engine string
	original      string // the labels without those that only tell copies apart
	ignored       bool
}

func (s *series) label(name string) (value string, ok bool) {
	for i := range s.labels {
		if s.labels[i].name == name {
			return s.labels[i].value, true
		}
	}
	return "", false
}

type sample struct {
	*series
	value float64 // finite and not negative
}

// A page holds the wanted samples of one metrics page, and reads the next one into the same memory. Series it has seen
// before are recognised by their bytes and not parsed again, so a page that only changes its values costs a scan. It is
// not safe for concurrent use.
type page struct {
	want     *wanted
	dialect  *Dialect // gives series their meaning; nil while it is being detected
	byFamily [][]sample
	lines    int // lines with something other than blanks and comments
	skipped  int // wanted lines that were dropped: not understood, NaN, infinite or negative
	bytes    int64

	number int
	known  map[string]*series
	order  []*series // as the page shows them
	next   int       // into order: what the page before had in this place
	parser expfmt.TextParser
	line1  bytes.Buffer // what the parser is given: one line
	other  []byte       // the unwanted name seen last; histograms repeat theirs hundreds of times
}

func newPage(want *wanted, d *Dialect) *page {
	return &page{
		want:     want,
		dialect:  d,
		byFamily: make([][]sample, len(want.names)),
		known:    make(map[string]*series),
		parser:   expfmt.NewTextParser(model.UTF8Validation),
	}
}

// adopt gives the series of p their meaning under d.
func (p *page) adopt(d *Dialect) {
	p.dialect = d
	for _, s := range p.known {
		d.identify(s)
	}
	for i, samples := range p.byFamily {
		p.byFamily[i] = slices.DeleteFunc(samples, func(s sample) bool { return s.ignored })
	}
}

// samples returns what the page last read says of a family.
func (p *page) samples(family string) []sample {
	if i, ok := p.want.ids[family]; ok {
		return p.byFamily[i]
	}
	return nil
}

var (
	errTooLarge = errors.New("page is larger than the limit")
	errHTML     = errors.New("page is HTML")
)

// errJSON is returned for a body that is JSON; body is as much of it as the limit allowed.
type errJSON struct{ body []byte }

func (errJSON) Error() string { return "page is JSON" }

const (
	chunkBytes    = 64 << 10
	keepChunkSize = 256 << 10 // larger buffers are not kept
)

var chunks = sync.Pool{New: func() any { return new(make([]byte, chunkBytes)) }}

// read scans the page that r yields, of which it takes at most limit bytes. On an error the samples of the lines before
// it are there. framed says that the end of r is the end of the page as the server meant it; without that a last line
// that has no line feed may be cut, and is dropped.
func (p *page) read(r io.Reader, limit int64, framed bool) error {
	for i := range p.byFamily {
		p.byFamily[i] = p.byFamily[i][:0]
	}
	p.lines, p.skipped, p.bytes, p.next = 0, 0, 0, 0
	p.number++
	defer p.forget()

	bp := chunks.Get().(*[]byte)
	buf := *bp
	defer func() {
		if cap(buf) <= keepChunkSize {
			*bp = buf[:cap(buf)]
			chunks.Put(bp)
		}
	}()
	begun := false
	n := 0 // buf[:n] has been read and holds no whole line
	for {
		room := buf[n:]
		if left := limit - p.bytes; int64(len(room)) > left {
			room = room[:left+1] // one more than allowed tells a page of the limit's size from a larger one
		}
		m, err := r.Read(room)
		p.bytes += int64(m)
		n += m
		if !begun {
			if b := bytes.TrimLeft(buf[:n], " \t\r\n"); len(b) > 0 {
				begun = true
				switch b[0] {
				case '<':
					return errHTML
				case '[', '{':
					return p.readJSON(b, r, limit, err)
				}
			}
		}
		tooLarge := p.bytes > limit
		// Only what is new can end a line: a page may come in many small pieces.
		if end := bytes.LastIndexByte(buf[n-m:n], '\n') + 1; end > 0 {
			end += n - m
			p.scan(buf[:end])
			n = copy(buf, buf[end:n])
		}
		switch {
		case tooLarge:
			return fmt.Errorf("%w of %d bytes", errTooLarge, limit)
		case err == io.EOF:
			if framed && n > 0 {
				p.scanLine(buf[:n])
			}
			return nil
		case err != nil:
			return err
		}
		if n == len(buf) { // a line longer than the buffer; limit bounds its growth
			buf = append(buf, make([]byte, len(buf))...)
		}
	}
}

func (p *page) readJSON(head []byte, r io.Reader, limit int64, err error) error {
	body := bytes.Clone(head)
	if err == nil {
		rest, _ := io.ReadAll(io.LimitReader(r, limit-p.bytes))
		p.bytes += int64(len(rest))
		body = append(body, rest...)
	}
	return errJSON{body}
}

// forget drops series that the page no longer shows, once they outnumber the others.
func (p *page) forget() {
	p.order = p.order[:p.next]
	shown := 0
	for _, s := range p.byFamily {
		shown += len(s)
	}
	if len(p.known) <= 2*shown+64 {
		return
	}
	for k, s := range p.known {
		if s.page != p.number {
			delete(p.known, k)
		}
	}
}

// scan takes in whole lines.
func (p *page) scan(b []byte) {
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n')
		p.scanLine(b[:end])
		b = b[end+1:]
	}
}

func blank(c byte) bool { return c == ' ' || c == '\t' }

func trimLeft(b []byte) []byte {
	for len(b) > 0 && blank(b[0]) {
		b = b[1:]
	}
	return b
}

func (p *page) scanLine(b []byte) {
	b = trimLeft(b)
	if len(b) == 0 || b[0] == '#' || b[0] == '\r' {
		return
	}
	p.lines++
	// Fast path: another bucket of the histogram that the line before belongs to.
	if n := len(p.other); n > 0 && len(b) > n && (b[n] == '{' || blank(b[n])) && string(b[:n]) == string(p.other) {
		return
	}
	n := 0
	for n < len(b) && b[n] != '{' && !blank(b[n]) {
		n++
	}
	id, ok := p.want.ids[string(b[:n])]
	if !ok {
		p.other = append(p.other[:0], b[:n]...)
		return
	}
	if !p.wantedLine(id, b, n) {
		p.skipped++
	}
}

// wantedLine takes in a line whose first n bytes are the name of family id. It reports whether the line was of use.
func (p *page) wantedLine(id int, b []byte, n int) bool {
	s, end := p.expected(b), 0
	if s != nil {
		end = len(s.text)
	} else if end = endOfSeries(b, n); end < 0 {
		return false
	}
	value, ok := parseValue(b[end:])
	if !ok {
		return false
	}
	if s == nil {
		if s = p.known[string(b[:end])]; s == nil {
			s = p.parse(id, b[:end])
			p.known[s.text] = s
		}
	}
	if p.next < len(p.order) {
		p.order[p.next] = s
	} else {
		p.order = append(p.order, s)
	}
	p.next++
	s.page = p.number
	if !s.readable {
		return false
	}
	if !s.ignored {
		p.byFamily[id] = append(p.byFamily[id], sample{s, value})
	}
	return true
}

// expected returns the series that the page before had in this place, if b is about it.
func (p *page) expected(b []byte) *series {
	if p.next >= len(p.order) {
		return nil
	}
	s := p.order[p.next]
	n := len(s.text)
	if len(b) <= n || !blank(b[n]) || string(b[:n]) != s.text {
		return nil
	}
	if s.text[n-1] != '}' && bytes.HasPrefix(trimLeft(b[n:]), []byte("{")) {
		return nil // the name alone, and here come labels
	}
	return s
}

// endOfSeries returns the length of the series that b begins with, of which the first n bytes are the name; -1 if its
// labels aren't closed.
func endOfSeries(b []byte, n int) int {
	rest := trimLeft(b[n:])
	if len(rest) == 0 || rest[0] != '{' {
		return n
	}
	closed := endOfLabels(rest)
	if closed < 0 {
		return -1
	}
	return len(b) - len(rest) + closed
}

// endOfLabels returns the length of the label set that b begins with, or -1 if it isn't closed. Values may hold braces,
// commas and escaped quotes.
func endOfLabels(b []byte) int {
	quoted := false
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			if quoted {
				i++
			}
		case '"':
			quoted = !quoted
		case '}':
			if !quoted {
				return i + 1
			}
		}
	}
	return -1
}

// parseValue reads what follows the series on a line: the value, and perhaps a timestamp and an exemplar, which are
// checked for their shape and dropped. A value that no gauge or counter of ours can have counts as none.
func parseValue(b []byte) (v float64, ok bool) {
	word := func() []byte {
		b = trimLeft(b)
		n := 0
		for n < len(b) && !blank(b[n]) {
			n++
		}
		w := b[:n]
		b = b[n:]
		return w
	}
	b = bytes.TrimRight(b, " \t\r")
	v, ok = parseNumber(word())
	if !ok || math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
		return 0, false
	}
	if b = trimLeft(b); len(b) > 0 && b[0] != '#' {
		if _, ok := parseNumber(word()); !ok { // the timestamp
			return 0, false
		}
		b = trimLeft(b)
	}
	return v, len(b) == 0 || b[0] == '#'
}

func parseNumber(b []byte) (float64, bool) {
	// Neither the text format nor OpenMetrics has hexadecimal or grouped digits, which ParseFloat takes.
	if bytes.ContainsAny(b, "pPxX_") {
		return 0, false
	}
	v, err := strconv.ParseFloat(string(b), 64)
	return v, err == nil
}

// parse gives name and labels to the Prometheus parser.
func (p *page) parse(id int, b []byte) *series {
	s := &series{text: string(b), family: id}
	p.line1.Reset()
	p.line1.Write(b)
	p.line1.WriteString(" 0\n")
	families, err := p.parser.TextToMetricFamilies(&p.line1)
	f := families[p.want.names[id]]
	if err != nil || f == nil || len(f.Metric) != 1 {
		return s
	}
	s.readable = true
	for _, l := range f.Metric[0].Label {
		s.labels = append(s.labels, label{l.GetName(), l.GetValue()})
	}
	if p.dialect != nil {
		p.dialect.identify(s)
	}
	return s
}
