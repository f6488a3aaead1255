package lines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
)

// A File is a [Destination] that lines are appended to. Its methods are safe for concurrent use.
type File struct {
	o FileOptions

	mu   sync.Mutex
	f    *os.File
	size int64
}

// FileOptions describe a [File].
type FileOptions struct {
	Name string
	Mode os.FileMode // of a new file; default 0640
	// MaxBytes is the size above which the file is renamed to Name.1, that one to Name.2, and so on; 0: never. Keep is how
	// many of those are kept.
	MaxBytes int64
	Keep     int
	// Header returns what a file begins with, and what is written when an existing one is opened. It ends with a newline.
	// nil: nothing is.
	Header func() []byte
}

// OpenFile opens the file, which is made if it doesn't exist.
func OpenFile(o FileOptions) (*File, error) {
	if o.Mode == 0 {
		o.Mode = 0o640
	}
	f := &File{o: o}
	return f, f.Reopen()
}

func (f *File) String() string { return f.o.Name }

// Reopen opens the file anew, so that it may have been rotated away by someone else.
func (f *File) Reopen() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open()
}

// open opens the file, and closes the one that was open if that worked.
func (f *File) open() error {
	n, err := os.OpenFile(f.o.Name, os.O_APPEND|os.O_CREATE|os.O_RDWR, f.o.Mode)
	if err != nil {
		return err
	}
	size, err := f.begin(n)
	if err != nil {
		return errors.Join(err, n.Close())
	}
	old := f.f
	f.f, f.size = n, size
	if old != nil {
		_ = old.Close()
	}
	return nil
}

// begin writes what a file begins with into n, which may hold lines already, and returns n's size.
func (f *File) begin(n *os.File) (int64, error) {
	fi, err := n.Stat()
	if err != nil {
		return 0, err
	}
	size := fi.Size()
	if f.o.Header == nil {
		return size, nil
	}
	header := f.o.Header()
	if size > 0 && fi.Mode().IsRegular() {
		var last [1]byte
		if _, err := n.ReadAt(last[:], size-1); err == nil && last[0] != '\n' {
			header = append([]byte("\n"), header...) // whoever wrote it last did not come to the end of a line
		}
	}
	m, err := n.Write(header)
	return size + int64(m), err
}

// Deliver implements [Destination].
func (f *File) Deliver(_ context.Context, lines []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	done := 0
	for done < len(lines) {
		piece := lines[done:]
		if f.o.MaxBytes > 0 {
			if piece = fitting(piece, f.o.MaxBytes-f.size); piece == nil {
				if err := f.rotate(); err != nil {
					return done, err
				}
				// A line that is too long for any file has one to itself.
				if piece = fitting(lines[done:], f.o.MaxBytes-f.size); piece == nil {
					piece = lines[done : done+1+bytes.IndexByte(lines[done:], '\n')]
				}
			}
		}
		n, err := f.f.Write(piece)
		done += n
		f.size += int64(n)
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// fitting returns whole lines from the front of lines, room bytes at most; nil if none fits.
func fitting(lines []byte, room int64) []byte {
	if int64(len(lines)) <= room {
		return lines
	}
	if room <= 0 {
		return nil
	}
	if i := bytes.LastIndexByte(lines[:room], '\n'); i >= 0 {
		return lines[:i+1]
	}
	return nil
}

// rotate renames the file and its predecessors, and opens a new one.
func (f *File) rotate() error {
	for i := f.o.Keep; i >= 1; i-- {
		from := f.o.Name
		if i > 1 {
			from += "." + strconv.Itoa(i-1)
		}
		if err := os.Rename(from, f.o.Name+"."+strconv.Itoa(i)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("rotate: %w", err)
		}
	}
	if f.o.Keep == 0 {
		if err := os.Remove(f.o.Name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("rotate: %w", err)
		}
	}
	// What is left of a time when more were kept.
	for i := f.o.Keep + 1; os.Remove(f.o.Name+"."+strconv.Itoa(i)) == nil; i++ {
	}
	return f.open()
}

// Close syncs and closes the file.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.f.Sync(), f.f.Close())
}
