package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxLineBytes is far more than any line that a Recorder writes.
const maxLineBytes = 1 << 20

// A Reader reads records. Header, Fleets and Line are of the line that Next returned last, or of those before it.
type Reader struct {
	in   *bufio.Reader
	name string
	line int
	next []byte // read already: the line after a bad one
	more bool   // next is one

	header Header
	fleets []Fleet
	// Warnings are what is wrong with the file and did not keep it from being read.
	Warnings []string
}

// NewReader returns a Reader. name is what errors call the file.
func NewReader(in io.Reader, name string) *Reader {
	return &Reader{in: bufio.NewReaderSize(in, 64<<10), name: name}
}

// Header is the header of the lines that are being read.
func (r *Reader) Header() *Header { return &r.header }

// Fleets are what serves the pools where the file is being read.
func (r *Reader) Fleets() []Fleet { return r.fleets }

// Number is the number of the line that was read last, from 1.
func (r *Reader) Number() int { return r.line }

// errorf is an error at the line that was read last.
func (r *Reader) errorf(format string, args ...any) error {
	return fmt.Errorf("%s:%d: %w", r.name, r.line, fmt.Errorf(format, args...))
}

// Next reads the next request into l. It returns io.EOF after the last one. A last line without its end was being written
// when the recorder was killed: it is left out, with a warning, and so is one before a header.
func (r *Reader) Next(l *Line) error {
	for {
		text, whole, err := r.read()
		if err != nil {
			return err
		}
		if len(bytes.TrimSpace(text)) == 0 {
			continue
		}
		err = r.parse(text, l)
		switch {
		case err == errOther:
			continue
		case err == nil:
			return nil
		case r.header.Version == 0 || !json.Valid(text) && r.cut(whole):
			if r.header.Version == 0 {
				return err
			}
			r.Warnings = append(r.Warnings, fmt.Sprintf("%s:%d: the line was cut off in writing; it is left out", r.name, r.line))
		default:
			return err
		}
	}
}

// errOther says that a line was no request's.
var errOther = errors.New("another line")

// cut reports whether a line that can't be read is one that the recorder did not come to the end of: nothing follows it, or a
// header does.
func (r *Reader) cut(whole bool) bool {
	if !whole {
		return true
	}
	if !r.more {
		line := r.line
		text, _, err := r.read()
		r.line = line
		if err != nil {
			return false // a whole line at the end is a bad one
		}
		r.next, r.more = bytes.Clone(text), true
	}
	return bytes.HasPrefix(r.next, []byte(headerStart))
}

// headerStart is what headers begin with.
const headerStart = `{"kvgate_record":`

// read returns the next line without its end; whole is whether it had one. It is valid until the next call.
func (r *Reader) read() (text []byte, whole bool, err error) {
	r.line++
	if r.more {
		r.more = false
		return r.next, true, nil
	}
	text, err = r.in.ReadSlice('\n')
	if err == bufio.ErrBufferFull {
		long := bytes.Clone(text)
		for err == bufio.ErrBufferFull && len(long) < maxLineBytes {
			text, err = r.in.ReadSlice('\n')
			long = append(long, text...)
		}
		if err == bufio.ErrBufferFull {
			return nil, false, r.errorf("a line of more than %d bytes; want a record made by kvgate serve", maxLineBytes)
		}
		text = long
	}
	switch {
	case err == nil:
		return text[:len(text)-1], true, nil
	case err != io.EOF:
		return nil, false, fmt.Errorf("%s: %w", r.name, err)
	case len(text) > 0:
		return text, false, nil
	case r.header.Version == 0:
		return nil, false, fmt.Errorf("%s: the file is empty; want a record: name it in record.file of the configuration and let requests come", r.name)
	}
	return nil, false, io.EOF
}

func (r *Reader) parse(text []byte, l *Line) error {
	switch {
	case bytes.HasPrefix(text, []byte(headerStart)):
		var h Header
		if err := json.Unmarshal(text, &h); err != nil {
			return r.errorf("header: %w", err)
		}
		switch {
		case h.Version > Version:
			return r.errorf("the record is of version %d; this kvgate reads version %d: use the kvgate that wrote it (%s), or a newer one", h.Version, Version, h.Kvgate)
		case h.Version < 1:
			return r.errorf("the record is of version %d; want %d", h.Version, Version)
		case h.Sample < 0 || h.Sample > 1 || h.WindowSeconds < 0:
			return r.errorf("header: sample %g of windows of %g s; want 0 to 1, and no negative time", h.Sample, h.WindowSeconds)
		}
		r.header, r.fleets = h, nil
		return errOther
	case r.header.Version == 0:
		return r.errorf(`no record: it begins %.40q; want a header, {"kvgate_record":%d, …}`, text, Version)
	case bytes.HasPrefix(text, []byte(`{"fleet":`)):
		var f struct{ Fleet Fleet }
		if err := json.Unmarshal(text, &f); err != nil {
			return r.errorf("fleet: %w", err)
		}
		if f.Fleet.Pool == "" || f.Fleet.Endpoints < 0 || f.Fleet.KVTokens < 0 || f.Fleet.AdapterSlots < 0 {
			return r.errorf("fleet: pool %q, %d endpoints of %d KV tokens; want a name and no negative number", f.Fleet.Pool, f.Fleet.Endpoints, f.Fleet.KVTokens)
		}
		for i := range r.fleets {
			if r.fleets[i].Pool == f.Fleet.Pool {
				r.fleets[i] = f.Fleet
				return errOther
			}
		}
		r.fleets = append(r.fleets, f.Fleet)
		return errOther
	}
	*l = Line{}
	if err := json.Unmarshal(text, l); err != nil {
		return r.errorf("not a request's record: %w; remove the line, or copy the file anew", err)
	}
	if err := l.Check(); err != nil {
		return r.errorf("%w; remove the line, or copy the file anew", err)
	}
	return nil
}
