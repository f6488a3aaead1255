package config

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

//go:generate go test -run TestExampleFile -update .

// Redacted is c as a file, with everything that was left out filled in and secrets as "[redacted]".
func Redacted(c *Config) []byte {
	p := printer{root: c}
	return toBytes(p.structure(reflect.ValueOf(c).Elem(), full))
}

// AnnotatedDefault is a file that names every key, with its default and its documentation. What has no default is shown
// by an example in a comment; pools, which have none either, by two examples. config.example.yaml is this text.
func AnnotatedDefault() []byte {
	c := Default()
	first := Pool{Name: "llama-70b", Models: []string{"meta-llama/Llama-3.3-70B-Instruct"}}
	first.setDefaults(c)
	first.Discovery.Static = []Endpoint{
		{URL: "http://127.0.0.1:8000", Weight: 1},
		{URL: "http://127.0.0.1:8001", ID: "gpu-b", Weight: 2},
	}
	second := Pool{Name: "qwen-coder"}
	second.setDefaults(c)
	second.Discovery.Static = []Endpoint{{URL: "https://127.0.0.1:8443", Weight: 1}}
	second.Policy = Policy{Weights: map[string]float64{"queue": 2, "kv_cache": 2, "prefix": 3, "lora_affinity": 1}}
	c.Pools = []Pool{first, second}

	p := printer{docs: docsOf(sources...), root: c}
	p.docs["Config.Pools"] += " The two below are examples on this machine: put your own servers in their place."
	lines := []string{
		"# Every key of kvgate's configuration. Values are the defaults; lines that begin with \"#\" and no space after it",
		"# show keys that have none. Only pools is required: those at the end are examples, to be replaced by yours.",
		"# `kvgate check FILE` finds every mistake in a file, `kvgate check --probe FILE` also asks the servers in it.",
		"#",
		"# Durations carry a unit (500ms, 5s, 2m, 1h30m), sizes too (B, KiB, MiB, GiB, or kB, MB, GB), ratios are 0..1.",
		"# Names of files are relative to this one. ${NAME} is taken from the environment in secrets, and nowhere else.",
		"# Unless its comment says otherwise, a key takes effect at reload (SIGHUP, a change of the file, POST /-/reload).",
		"",
	}
	return toBytes(append(lines, p.structure(reflect.ValueOf(c).Elem(), full)...))
}

func toBytes(lines []string) []byte { return []byte(strings.Join(lines, "\n") + "\n") }

// A printer writes configurations as YAML. It does by hand what yaml.v3 cannot: keys that are commented out.
type printer struct {
	docs map[string]string // by Type.Field; nil prints no comments and no absent keys. Each is printed once.
	root *Config           // what is printed; pools inherit from it
}

// How much of a struct is printed.
type extent int

const (
	full  extent = iota // every key
	brief               // keys that differ from their defaults
)

// structure returns the lines of a struct's keys.
func (p *printer) structure(v reflect.Value, ext extent) (lines []string) {
	def := reflect.New(v.Type())
	setDefaults(def, p.root)
	for _, f := range fieldsOf(v.Type()) {
		fv := v.FieldByIndex(f.index)
		absent := f.optional && fv.IsZero()
		if f.typ == secretType {
			// What was read from a file is not shown twice.
			file := v.FieldByName(v.Type().FieldByIndex(f.index).Name + "File")
			absent = absent || file.IsValid() && file.String() != ""
		}
		if absent && (p.docs == nil || ext == brief) || ext == brief && reflect.DeepEqual(fv.Interface(), def.Elem().FieldByIndex(f.index).Interface()) {
			continue
		}
		top := v.Type() == reflect.TypeFor[Config]() && p.docs != nil
		if top && len(lines) > 0 {
			lines = append(lines, "")
		}
		lines = append(lines, p.comment(f)...)
		if absent {
			lines = append(lines, prefix("#", "#", p.example(f))...)
		} else {
			lines = append(lines, p.entry(f.name, fv, ext)...)
		}
	}
	return lines
}

// entry returns the lines of one key and its value.
func (p *printer) entry(key string, v reflect.Value, ext extent) []string {
	if s, ok := p.inline(v); ok {
		return []string{key + ": " + s}
	}
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	lines := []string{key + ":"}
	if v.Kind() == reflect.Struct {
		return append(lines, prefix("  ", "  ", p.structure(v, ext))...)
	}
	for i := range v.Len() { // a slice
		e, ext := v.Index(i), full
		if p.docs != nil && i > 0 && e.Type() == reflect.TypeFor[Pool]() {
			ext = brief
			lines = append(lines, "")
		}
		if s, ok := p.inline(e); ok {
			lines = append(lines, "  - "+s)
			continue
		}
		lines = append(lines, prefix("  ", "  ", item(p.structure(e, ext)))...)
	}
	return lines
}

// item makes the lines of a struct those of an item of a list. The dash goes to the first key, which comments may precede.
func item(lines []string) []string {
	first := slices.IndexFunc(lines, func(l string) bool { return len(l) < 2 || l[0] != '#' || l[1] != ' ' })
	return append(prefix("  ", "  ", lines[:first]), prefix("- ", "  ", lines[first:])...)
}

// example returns the lines of a key that has no value.
func (p *printer) example(f field) []string {
	if f.example != "" {
		return []string{f.name + ": " + f.example}
	}
	v := reflect.New(f.typ.Elem())
	setDefaults(v, p.root)
	inner := p.structure(v.Elem(), full)
	// Within what is commented out nothing needs to be commented out again.
	for i, l := range inner {
		if len(l) > 2 && l[0] == '#' && (l[1] != ' ' || l[2] == ' ') {
			inner[i] = l[1:]
		}
	}
	if f.typ.Kind() == reflect.Slice {
		inner = item(inner)
	}
	return append([]string{f.name + ":"}, prefix("  ", "  ", inner)...)
}

// inline returns a value that fits on the line of its key.
func (p *printer) inline(v reflect.Value) (string, bool) {
	switch x := v.Interface().(type) {
	case time.Duration:
		return formatDuration(x), true
	case Bytes:
		return x.String(), true
	case Secret:
		return text(x.String()), true
	case string:
		return text(x), true
	case bool:
		return strconv.FormatBool(x), true
	case int:
		return strconv.Itoa(x), true
	case float64:
		return strconv.FormatFloat(x, 'g', -1, 64), true
	case *time.Duration:
		return formatDuration(*x), true
	case map[string]float64:
		return flow(x, func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }), true
	case map[string]string:
		return flow(x, text), true
	}
	if v.Kind() == reflect.Slice && v.Len() == 0 {
		return "[]", true
	}
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct {
		return "", false
	}
	// A plain string stands for a struct that has nothing else to say.
	def := reflect.New(v.Type())
	setDefaults(def, p.root)
	short, plain := "", false
	for _, f := range fieldsOf(v.Type()) {
		fv := v.FieldByIndex(f.index)
		if f.short {
			short, plain = text(fv.String()), fv.String() != ""
		} else if !reflect.DeepEqual(fv.Interface(), def.Elem().FieldByIndex(f.index).Interface()) {
			return "", false
		}
	}
	return short, plain
}

// flow is a mapping on one line, by its keys.
func flow[V any](m map[string]V, show func(V) string) string {
	var b strings.Builder
	for i, k := range slices.Sorted(maps.Keys(m)) {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s: %s", text(k), show(m[k]))
	}
	return "{" + b.String() + "}"
}

// text is a string as a YAML scalar of one line.
func text(s string) string {
	n := yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
	word := slices.Contains([]string{"on", "off", "yes", "no", "y", "n"}, strings.ToLower(s)) // booleans to YAML 1.1
	if word || strings.ContainsAny(s, ":#{}[],&*!|>'\"%@`") || s == "" {
		n.Style = yaml.DoubleQuotedStyle
	}
	b, err := yaml.Marshal(&n)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	out := strings.TrimSuffix(string(b), "\n")
	if strings.Contains(out, "\n") { // long text that the library has folded
		return strconv.Quote(s)
	}
	return out
}

func prefix(first, rest string, lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		if i > 0 {
			first = rest
		}
		out[i] = first + l
		if l == "" {
			out[i] = ""
		}
	}
	return out
}

// named is a comment on f with the key's name for the field's.
func (f *field) named(doc string) string {
	_, goName, _ := strings.Cut(f.doc, ".")
	if rest, ok := strings.CutPrefix(doc, goName+" "); ok {
		return f.name + " " + rest
	}
	return doc
}

// comment returns the documentation of a key, once.
func (p *printer) comment(f field) (lines []string) {
	doc := p.docs[f.doc]
	if doc == "" {
		return nil
	}
	delete(p.docs, f.doc)
	doc = f.named(doc)
	if f.min != "" && !strings.Contains(doc, f.min+".."+f.max) {
		doc += " Range: " + f.min + " to " + f.max + "."
	}
	if f.restart && !strings.Contains(doc, "restart") {
		doc += " A change needs a restart."
	}
	const width = 110
	line := "#"
	for w := range strings.FieldsSeq(doc) {
		if len(line)+1+len(w) > width {
			lines, line = append(lines, line), "#"
		}
		line += " " + w
	}
	return append(lines, line)
}

// docsOf returns the comments on the struct fields of Go source files, by Type.Field.
func docsOf(sources ...string) map[string]string {
	out := make(map[string]string)
	for _, src := range sources {
		file, err := parser.ParseFile(token.NewFileSet(), "", src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			panic("BUG: " + err.Error())
		}
		addDocs(out, file)
	}
	return out
}

func addDocs(out map[string]string, file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		t, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := t.Type.(*ast.StructType); ok {
			for _, f := range s.Fields.List {
				for _, name := range f.Names {
					out[t.Name.Name+"."+name.Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				}
			}
		}
		return false
	})
}
