package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

// Options carry what a file is checked against besides itself.
type Options struct {
	Dialects []string // registered dialects; auto and custom are always among them
	Policies []string // registered policies; auto is always among them
	Scorers  []string // registered scorers, in snake_case

	// ScorerName returns the registered name of a scorer in another spelling; nil accepts camelCase and hyphens only.
	ScorerName func(string) (name string, ok bool)

	// Env looks up environment variables; os.LookupEnv if nil.
	Env func(name string) (string, bool)
}

// names returns the list that a known tag refers to.
func (o *Options) names(kind string) []string {
	switch kind {
	case "dialect":
		return set(o.Dialects, "auto", "custom")
	case "policy":
		return set(o.Policies, "auto")
	case "scorer":
		return o.Scorers
	}
	panic("BUG: known tag " + kind)
}

func set(names []string, more ...string) []string {
	all := append(more, names...)
	slices.Sort(all)
	return slices.Compact(all)
}

// maxFileBytes is the largest file that is read. A thousand endpoints take about 100 KiB.
const maxFileBytes = 4 << 20

// Load reads the file at path. The error, if any, is of type [Problems] and holds every mistake in the file.
func Load(path string, opt Options) (*Config, error) {
	data, err := ReadFile(path, maxFileBytes+1)
	if err != nil {
		return nil, Problems{{File: path, Message: "cannot be read: " + reason(err), Severity: Error}}
	}
	return Parse(path, data, opt)
}

// pipeTimeout is how long a pipe may take to tell all it has.
const pipeTimeout = 5 * time.Second

// ReadFile returns the first bytes, limit at most, of a file that a user has named. A pipe is read too, as shells make
// them of commands, but waited for no longer than 5 s.
func ReadFile(path string, limit int64) ([]byte, error) { return readFile(path, limit, pipeTimeout) }

func readFile(path string, limit int64, patience time.Duration) ([]byte, error) {
	// A pipe that nobody writes into would block at being opened.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	_ = f.SetReadDeadline(time.Now().Add(patience)) // files have none, and don't need it
	data, err := io.ReadAll(io.LimitReader(f, limit))
	switch pipe := st.Mode()&os.ModeNamedPipe != 0; {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, &os.PathError{Op: "read", Path: path, Err: fmt.Errorf("it is no file, and has not come to its end within %v", patience)}
	case pipe && err == nil && len(data) == 0:
		return nil, &os.PathError{Op: "read", Path: path, Err: errors.New("it is a pipe that nobody writes into")}
	}
	return data, err
}

// reason is err without the file name, which the message has already.
func reason(err error) string {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		err = pe.Err
	}
	return err.Error()
}

// Parse is [Load] for a file that has been read; name is used in messages and to find files it refers to.
func Parse(name string, data []byte, opt Options) (*Config, error) {
	d := newDecoder(name, opt)
	d.decode(data)
	if len(d.problems.Errors()) > 0 {
		return nil, d.problems
	}
	c := d.root
	c.file, c.warnings = name, d.problems
	sum := sha256.Sum256(data)
	c.hash = hex.EncodeToString(sum[:])
	c.inputs = d.inputs(data)
	return c, nil
}

func newDecoder(name string, opt Options) *decoder {
	if opt.Env == nil {
		opt.Env = os.LookupEnv
	}
	dir := filepath.Dir(name)
	if abs, err := filepath.Abs(dir); err == nil { // or else we are nowhere, and relative names are as good as any
		dir = abs
	}
	return &decoder{
		opt: opt, file: name, dir: dir, root: Default(), least: "pools, each with name and discovery",
		values: make(map[string]*yaml.Node), bad: make(map[string]bool), badBelow: make(map[string]bool),
	}
}

// decode fills root and notes all problems.
func (d *decoder) decode(data []byte) {
	var more Problems // of other files
	if n := d.parse(data); n != nil {
		d.value("", n, reflect.ValueOf(d.root).Elem(), field{})
		if n.Kind == yaml.MappingNode && !d.spent() {
			more = d.loadKeys()
			d.validate()
		}
	}
	d.problems.sort()
	d.problems = append(d.problems, more...)
}

// parse turns data into the tree of its only document, or notes why it can't.
func (d *decoder) parse(data []byte) *yaml.Node {
	if len(data) > maxFileBytes {
		d.add(&yaml.Node{Line: 1, Column: 1}, "", "the file is larger than "+Bytes(maxFileBytes).String(), "put endpoints into a file of their own: discovery.file")
		return nil
	}
	if !utf8.Valid(data) {
		at := 0
		for r, size := utf8.DecodeRune(data); r != utf8.RuneError || size != 1; r, size = utf8.DecodeRune(data[at:]) {
			at += size
		}
		d.add(position(data, at), "", "is not UTF-8 text", "save the file as UTF-8")
		return nil
	}
	var doc, second yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(data))
	switch err := decodeNode(dec, &doc); {
	case errors.Is(err, io.EOF), err == nil && isNull(&doc):
		d.add(&yaml.Node{Line: 1, Column: 1}, "", "the file is empty", "the least it needs is "+d.least)
		return nil
	case err != nil:
		d.syntax(data, err)
		return nil
	}
	switch err := decodeNode(dec, &second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		d.syntax(data, err)
		return nil
	default:
		n := &second
		if len(n.Content) > 0 {
			n = n.Content[0]
		}
		n.Line = min(n.Line, bytes.Count(data, []byte("\n"))+1) // an empty one counts as the line after
		d.add(n, "", "a second document", "remove what follows \"---\"; one file holds one configuration")
	}
	return doc.Content[0]
}

func isNull(doc *yaml.Node) bool {
	return len(doc.Content) == 0 || doc.Content[0].Kind == yaml.ScalarNode && doc.Content[0].Tag == "!!null"
}

// decodeNode guards against panics of the YAML library: it converts its own to errors, but its lists of bugs say that
// not every input is foreseen, and a reload must never end the process.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("yaml: %v", r)
		}
	}()
	return dec.Decode(n)
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// syntax notes an error of the YAML library, whose text knows the line but no column.
func (d *decoder) syntax(data []byte, err error) {
	message, line := err.Error(), 1
	if m := yamlLine.FindStringSubmatch(message); m != nil {
		message = m[2]
		line, _ = strconv.Atoi(m[1])
	}
	lines := bytes.Split(data, []byte("\n"))
	// The library tells where the broken construct starts, which for a tab can be far above it.
	for i, l := range lines {
		if indent := l[:len(l)-len(bytes.TrimLeft(l, " \t"))]; bytes.ContainsRune(indent, '\t') && len(indent) < len(bytes.TrimRight(l, "\r")) {
			d.add(&yaml.Node{Line: i + 1, Column: bytes.IndexByte(l, '\t') + 1}, "", "a tab in the indentation", "write spaces")
			return
		}
	}
	line = min(max(line, 1), len(lines))
	if at, message, hint := layout(lines); at != nil {
		d.add(at, "", message, hint)
		return
	}
	text := lines[line-1]
	hint := "check the indentation of this line and the one above, and put text with special characters in quotes"
	switch {
	case strings.Contains(message, "mapping values are not allowed"):
		hint = `check the indentation; text that holds ": " needs quotes`
	case strings.Contains(message, "cannot start any token"):
		hint = "put the value in quotes"
	case strings.Contains(message, "did not find expected ',' or"):
		hint = "close the bracket, or put the value in quotes"
	case strings.Contains(message, "unexpected end of stream"):
		hint = "close the quote or the bracket"
	case strings.Contains(message, "unknown anchor"):
		hint = `define it with "&" before this line, or put the value in quotes`
	case strings.Contains(message, "control characters"):
		hint = "remove them"
	}
	column := len(text) - len(bytes.TrimLeft(text, " ")) + 1
	d.add(&yaml.Node{Line: line, Column: column}, "", "not valid YAML: "+clip(message), hint)
}

var tightKey = regexp.MustCompile(`^\s*(?:- +)*([a-z_]+):([^\s/].*)$`)

// layout finds the line that probably broke the layout of a file which is not valid YAML: a colon or a dash without a
// space after it, or an indentation that fits no line above. It guesses: it knows nothing of text over several lines.
func layout(lines [][]byte) (at *yaml.Node, message, hint string) {
	var known []string
	known = keysBelow(reflect.TypeFor[Config](), known)
	levels := []int{0}
	nests, open := true, 0 // whether the line before may have something below it; brackets that are open
	for i, raw := range lines {
		l := string(bytes.TrimRight(raw, " \t\r"))
		text := strings.TrimLeft(l, " ")
		if text == "" || text[0] == '#' {
			continue
		}
		was := open
		open += strings.Count(l, "[") + strings.Count(l, "{") - strings.Count(l, "]") - strings.Count(l, "}")
		if was > 0 {
			continue
		}
		indent := len(l) - len(text)
		node := &yaml.Node{Line: i + 1, Column: indent + 1}
		if m := tightKey.FindStringSubmatch(l); m != nil && slices.Contains(known, m[1]) {
			return node, "no space after " + strconv.Quote(m[1]+":"), "write " + strconv.Quote(m[1]+": "+clip(m[2]))
		}
		if rest, ok := strings.CutPrefix(text, "-"); ok && rest != "" && rest[0] != ' ' && rest != "--" {
			return node, `no space after "-"`, "write " + strconv.Quote("- "+clip(rest))
		}
		for levels[len(levels)-1] > indent {
			levels = levels[:len(levels)-1]
			nests = false
		}
		switch top := levels[len(levels)-1]; {
		case indent > top && !nests:
			return node, fmt.Sprintf("is indented by %d, which fits no line above", indent), fmt.Sprintf("indent it by %d like its neighbours, or as the keys that it belongs to", top)
		case indent > top:
			levels = append(levels, indent)
		}
		for strings.HasPrefix(text, "- ") { // an item's keys are a level of their own
			rest := strings.TrimLeft(text[1:], " ")
			indent += len(text) - len(rest)
			text = rest
			levels = append(levels, indent)
		}
		nests = strings.HasSuffix(text, ":") || text == "-" || strings.HasSuffix(text, "|") || strings.HasSuffix(text, ">")
	}
	return nil, "", ""
}

// keysBelow appends the names of all keys of t and of what it holds.
func keysBelow(t reflect.Type, keys []string) []string {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	for _, f := range structFields(t) {
		keys = keysBelow(f.typ, append(keys, f.name))
	}
	return keys
}

// position makes a node for the byte at offset at.
func position(data []byte, at int) *yaml.Node {
	before := data[:at]
	return &yaml.Node{
		Line:   bytes.Count(before, []byte("\n")) + 1,
		Column: utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:]) + 1,
	}
}
