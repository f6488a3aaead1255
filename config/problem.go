package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Severity says whether a problem keeps a file from being used.
type Severity string

const (
	Error   Severity = "error"   // the file is refused
	Warning Severity = "warning" // the file is used
)

// A Problem is one mistake in a file.
type Problem struct {
	File     string   `json:"file"`
	Line     int      `json:"line,omitempty"`   // from 1; 0 when the file as a whole is meant
	Column   int      `json:"column,omitempty"` // from 1, in characters
	Path     string   `json:"path,omitempty"`   // the key as written: pools[0].policy
	Message  string   `json:"message"`          // what was found
	Hint     string   `json:"hint,omitempty"`   // what to write
	Severity Severity `json:"severity"`
}

// Error is the problem in one line: file:line:col: path: what was found; what to write.
func (p Problem) Error() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
	}
	b.WriteString(": ")
	if p.Severity == Warning {
		b.WriteString("warning: ")
	}
	if p.Path != "" {
		b.WriteString(p.Path + ": ")
	}
	b.WriteString(p.Message)
	if p.Hint != "" {
		b.WriteString("; " + p.Hint)
	}
	return b.String()
}

// Problems are all mistakes of a file, in the order of its lines. As an error it prints one a line.
type Problems []Problem

func (ps Problems) Error() string {
	var b strings.Builder
	for i, p := range ps {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(p.Error())
	}
	return b.String()
}

// Errors are the problems that keep the file from being used.
func (ps Problems) Errors() Problems { return ps.only(Error) }

// Warnings are those that do not.
func (ps Problems) Warnings() Problems { return ps.only(Warning) }

func (ps Problems) only(s Severity) (out Problems) {
	for _, p := range ps {
		if p.Severity == s {
			out = append(out, p)
		}
	}
	return out
}

func (ps Problems) sort() {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), strings.Compare(a.Path, b.Path))
	})
}
