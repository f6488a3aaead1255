package config

import (
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
)

// A decoder walks a YAML tree and the Go types it is for at the same time. Unlike yaml.v3's own it goes on after a
// mistake, knows columns, and remembers where each value stood, for the checks that come after it.
type decoder struct {
	opt      Options
	file     string
	dir      string // of the file; relative names start here
	root     *Config
	least    string // what a file holds at least
	problems Problems
	values   map[string]*yaml.Node // by path
	bad      map[string]bool       // paths that were already complained about
	badBelow map[string]bool       // those, and the paths they are in
	visited  int
}

// maxNodes bounds the work: through aliases a small file can name a great many nodes.
const maxNodes = 1 << 18

func (d *decoder) markBad(path string) {
	d.bad[path] = true
	for ; !d.badBelow[path]; path = parent(path) {
		d.badBelow[path] = true
	}
}

// spent reports whether going on would be pointless.
func (d *decoder) spent() bool { return d.visited > maxNodes || len(d.problems) > maxProblems }

// A field is what the tags of a struct field say.
type field struct {
	name     string
	index    []int
	enum     []string
	known    string
	min, max string
	example  string
	optional bool // has an example tag: may be absent altogether
	path     string
	short    bool
	restart  bool
	number   bool   // text that may be a whole number without quotes
	doc      string // Type.Field, to find its comment
	typ      reflect.Type
}

var fieldCache sync.Map // reflect.Type to []field

// fieldsOf lists the keys of a struct type in their order, those of inlined structs among them.
func fieldsOf(t reflect.Type) []field {
	if fs, ok := fieldCache.Load(t); ok {
		return fs.([]field)
	}
	fs := readFields(t)
	fieldCache.Store(t, fs)
	return fs
}

func readFields(t reflect.Type) (out []field) {
	for i := range t.NumField() {
		sf := t.Field(i)
		if !sf.IsExported() {
			continue
		}
		if sf.Anonymous {
			for _, f := range fieldsOf(sf.Type) {
				f.index = append([]int{i}, f.index...)
				out = append(out, f)
			}
			continue
		}
		f := field{
			name:  sf.Tag.Get("yaml"),
			index: []int{i},
			known: sf.Tag.Get("known"),
			min:   sf.Tag.Get("min"),
			max:   sf.Tag.Get("max"),
			path:  sf.Tag.Get("path"),
			short: sf.Tag.Get("short") != "",
			doc:   t.Name() + "." + sf.Name,
			typ:   sf.Type,

			restart: sf.Tag.Get("restart") != "",
			number:  sf.Tag.Get("number") != "",
		}
		f.example, f.optional = sf.Tag.Lookup("example")
		if e := sf.Tag.Get("enum"); e != "" {
			f.enum = strings.Split(e, ",")
		}
		out = append(out, f)
	}
	return out
}

func names(fs []field) []string {
	out := make([]string, len(fs))
	for i, f := range fs {
		out[i] = f.name
	}
	return out
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	bytesType    = reflect.TypeFor[Bytes]()
	secretType   = reflect.TypeFor[Secret]()
)

// maxProblems bounds what a broken file makes us print.
const maxProblems = 200

// add notes a problem at n.
func (d *decoder) add(n *yaml.Node, path, message, hint string) {
	if len(d.problems) > maxProblems {
		return
	}
	d.markBad(path)
	if len(d.problems) == maxProblems {
		n, path, message, hint = nil, "", fmt.Sprintf("more than %d problems", maxProblems), "mend these first"
	}
	p := Problem{File: d.file, Path: printable(path), Message: printable(message), Hint: printable(hint), Severity: Error}
	if n != nil {
		p.Line, p.Column = n.Line, n.Column
	}
	d.problems = append(d.problems, p)
}

// value decodes n into v, which holds the default.
func (d *decoder) value(path string, n *yaml.Node, v reflect.Value, f field) {
	if d.visited++; d.spent() {
		if d.visited == maxNodes+1 {
			d.add(n, path, "the file holds too many values, or aliases to them", "put endpoints into a file of their own: discovery.file")
		}
		return
	}
	at := n // where it is written, for messages; an alias stands for something elsewhere
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	d.values[path] = at

	switch {
	case n.Style&yaml.TaggedStyle != 0:
		d.add(at, path, "the tag "+clip(n.Tag)+" has no meaning here", "remove it")
		return
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		if fs := structFields(v.Type()); fs != nil {
			d.add(at, path, "has no value", "remove the key, or write under it: "+strings.Join(names(fs), ", "))
		} else {
			d.add(at, path, "has no value", "write one, or remove the key to have the default")
		}
		return
	}

	switch t := v.Type(); {
	case t.Kind() == reflect.Pointer:
		p := reflect.New(t.Elem())
		setDefaults(p, d.root)
		v.Set(p)
		d.value(path, n, p.Elem(), f)
		d.values[path] = at
	case t == secretType || t == durationType || t == bytesType:
		d.scalar(path, at, n, v, f)
	case t.Kind() == reflect.Struct:
		d.structure(path, at, n, v)
	case t.Kind() == reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			hint := `write a list, each item after "- "`
			if path == "pools" {
				hint = `write a list, such as [{name: llama, discovery: {static: ["http://10.0.0.11:8000"]}}], or "- name: llama" with the other keys below`
			} else if n.Kind == yaml.ScalarNode {
				hint = "write [" + show(n) + "]"
			}
			d.add(at, path, describe(n)+" where a list belongs", hint)
			return
		}
		out := reflect.MakeSlice(t, len(n.Content), len(n.Content))
		for i, c := range n.Content {
			if d.spent() {
				return
			}
			e := out.Index(i)
			setDefaults(e.Addr(), d.root)
			d.value(path+"["+strconv.Itoa(i)+"]", c, e, f)
		}
		v.Set(out)
	case t.Kind() == reflect.Map && t.Elem().Kind() == reflect.String:
		d.texts(path, at, n, v)
	case t.Kind() == reflect.Map:
		d.weights(path, at, n, v, f)
	default:
		d.scalar(path, at, n, v, f)
	}
}

func setDefaults(ptr reflect.Value, root *Config) {
	if s, ok := ptr.Interface().(interface{ setDefaults(*Config) }); ok {
		s.setDefaults(root)
	}
}

// structFields returns the keys of a struct type, or of what a pointer points to; nil for anything else.
func structFields(t reflect.Type) []field {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == secretType {
		return nil
	}
	return fieldsOf(t)
}

func (d *decoder) structure(path string, at, n *yaml.Node, v reflect.Value) {
	fs := fieldsOf(v.Type())
	if n.Kind == yaml.ScalarNode {
		for _, f := range fs {
			if f.short {
				d.value(path, at, v.FieldByIndex(f.index), f)
				return
			}
		}
	}
	if n.Kind != yaml.MappingNode {
		hint := "known keys: " + strings.Join(names(fs), ", ")
		if key, rest, ok := strings.Cut(n.Value, ":"); ok && slices.Contains(names(fs), key) {
			hint = "write " + strconv.Quote(key+": "+clip(rest)) + ", with a space after the colon"
		}
		d.add(at, path, describe(n)+" where keys belong", hint)
		return
	}
	pairs := d.pairs(path, n)
	// In the order of the struct, so that what pools inherit has been read before them.
	for _, f := range fs {
		for _, p := range pairs {
			if p.key.Value == f.name {
				d.value(join(path, f.name), p.value, v.FieldByIndex(f.index), f)
			}
		}
	}
	keys := names(fs)
	for _, p := range pairs {
		if !d.spent() && !slices.Contains(keys, p.key.Value) {
			d.add(p.key, join(path, p.key.Value), "unknown key", unknownKey(p.key.Value, v.Type(), fs))
		}
	}
}

type pair struct{ key, value *yaml.Node }

// pairs returns the entries of a mapping without those whose keys are unusable or repeated.
func (d *decoder) pairs(path string, n *yaml.Node) []pair {
	out := make([]pair, 0, len(n.Content)/2)
	seen := make(map[string]*yaml.Node, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		switch {
		case k.Kind == yaml.ScalarNode && k.Tag == "!!merge":
			d.add(k, join(path, "<<"), "merge keys are not supported", "write the keys out, or use an alias for the whole value")
			d.markBad(path) // what it lacks may be in what it would have merged
		case k.Kind != yaml.ScalarNode || k.Style&yaml.TaggedStyle != 0:
			d.add(k, join(path, "?"), describe(k)+" where a key belongs", "write a word followed by a colon")
		case seen[k.Value] != nil:
			d.add(k, join(path, k.Value), fmt.Sprintf("duplicate key; the first one is in line %d", seen[k.Value].Line), "remove one of the two")
		default:
			seen[k.Value] = k
			out = append(out, pair{k, v})
		}
	}
	return out
}

// Keys that other gateways use, and where ours are.
var foreignKeys = map[string]string{
	"endpoints": "discovery.static", "backends": "discovery.static", "upstreams": "discovery.static",
	"servers": "discovery.static", "workers": "discovery.static", "targets": "discovery.static",
	"strategy": "policy", "load_balancer": "policy", "plugins": "policy", "scorers": "policy.weights",
}

func unknownKey(key string, t reflect.Type, fs []field) string {
	if s := suggest(key, names(fs)); s != "" {
		return "did you mean " + strconv.Quote(s) + "?"
	}
	if s := foreignKeys[snakeCase(key)]; s != "" && (t == reflect.TypeFor[Pool]() || t == reflect.TypeFor[Config]()) {
		if t == reflect.TypeFor[Config]() {
			s = "pools[]." + s
		}
		return "that is " + s + " here"
	}
	if at := places(reflect.TypeFor[Config](), "", snakeCase(key)); len(at) > 0 && len(at) <= 3 {
		return "that key belongs at " + strings.Join(at, " or ")
	}
	return "known keys: " + strings.Join(names(fs), ", ")
}

// places lists the paths below t at which key is known.
func places(t reflect.Type, path, key string) (out []string) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		if t.Kind() == reflect.Slice {
			path += "[]"
		}
		t = t.Elem()
	}
	for _, f := range structFields(t) {
		p := join(path, f.name)
		if f.name == key {
			out = append(out, p)
		}
		out = append(out, places(f.typ, p, key)...)
	}
	return out
}

// weights decodes a mapping of scorer names to numbers, each name in its registered spelling.
func (d *decoder) weights(path string, at, n *yaml.Node, v reflect.Value, f field) {
	known := d.opt.names(f.known)
	if n.Kind != yaml.MappingNode {
		d.add(at, path, describe(n)+" where names with weights belong", "write {queue: 2, kv_cache: 2}")
		return
	}
	out := make(map[string]float64, len(n.Content)/2)
	spelled := make(map[string]string, len(n.Content)/2) // by name
	for _, p := range d.pairs(path, n) {
		name, written := snakeCase(p.key.Value), join(path, p.key.Value)
		ok := slices.Contains(known, name)
		if !ok && d.opt.ScorerName != nil {
			name, ok = d.opt.ScorerName(p.key.Value)
		}
		if !ok {
			d.add(p.key, written, "unknown scorer", hintFor(p.key.Value, "scorers", known))
			continue
		}
		if _, ok := out[name]; ok {
			d.add(p.key, written, clip(p.key.Value)+" and "+clip(spelled[name])+" are both the scorer "+name, "remove one of the two")
			continue
		}
		spelled[name] = p.key.Value
		var w float64
		d.value(written, p.value, reflect.ValueOf(&w).Elem(), field{})
		if w < 0 || math.IsInf(w, 0) || math.IsNaN(w) {
			d.add(p.value, written, show(p.value)+" is not a weight", "write a number from 0 up")
		}
		out[name] = w
	}
	v.Set(reflect.ValueOf(out))
}

// texts decodes a mapping of text to text.
func (d *decoder) texts(path string, at, n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		d.add(at, path, describe(n)+" where names with values belong", "write {name: value}")
		return
	}
	out := make(map[string]string, len(n.Content)/2)
	for _, p := range d.pairs(path, n) {
		var s string
		if p.key.Value == "" {
			d.add(p.key, path, "an empty name", "write one")
			continue
		}
		d.value(join(path, p.key.Value), p.value, reflect.ValueOf(&s).Elem(), field{})
		out[p.key.Value] = s
	}
	v.Set(reflect.ValueOf(out))
}

func (d *decoder) scalar(path string, at, n *yaml.Node, v reflect.Value, f field) {
	if v.Type() == secretType {
		d.secret(path, at, n, v)
		return
	}
	if n.Kind != yaml.ScalarNode {
		d.add(at, path, describe(n)+" where a single value belongs", "write "+sample(v.Type(), f))
		return
	}
	quoted := n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0
	not := func(what, hint string) { d.add(at, path, show(n)+" is not "+what, hint) }
	switch t := v.Type(); {
	case t == durationType:
		dur, fix := parseDuration(n.Value)
		if fix != "" {
			hint := "write " + strconv.Quote(fix)
			if i, err := strconv.Atoi(n.Value); err == nil && i >= 100 { // seconds, or milliseconds?
				hint = "write " + strconv.Quote(n.Value+"ms") + " or " + strconv.Quote(fix)
			}
			not("a duration", hint)
			return
		}
		v.SetInt(int64(dur))
		inRange(d, at, path, n, f, dur, func(s string) time.Duration { dur, _ := parseDuration(s); return dur })
	case t == bytesType:
		b, fix := parseBytes(n.Value)
		if fix != "" {
			not("a size", "write "+strconv.Quote(fix))
			return
		}
		v.SetInt(int64(b))
		inRange(d, at, path, n, f, b, func(s string) Bytes { b, _ := parseBytes(s); return b })
	case t.Kind() == reflect.Bool:
		if quoted || n.Value != "true" && n.Value != "false" {
			switch strings.ToLower(n.Value) {
			case "yes", "on", "true", "y", "1":
				not("true or false", "write true")
			case "no", "off", "false", "n", "0":
				not("true or false", "write false")
			default:
				not("true or false", "write one of the two")
			}
			return
		}
		v.SetBool(n.Value == "true")
	case t.Kind() == reflect.Int:
		i, err := strconv.Atoi(n.Value)
		if err != nil || quoted {
			fix := sample(t, f)
			if x, e := strconv.ParseFloat(n.Value, 64); e == nil && x == math.Trunc(x) && math.Abs(x) < 1e15 {
				fix = strconv.FormatFloat(x, 'f', -1, 64)
			}
			not("a whole number", "write "+fix)
			return
		}
		v.SetInt(int64(i))
		inRange(d, at, path, n, f, i, func(s string) int { i, _ := strconv.Atoi(s); return i })
	case t.Kind() == reflect.Float64:
		x, err := strconv.ParseFloat(n.Value, 64)
		if n.Tag == "!!float" && strings.Contains(strings.ToLower(n.Value), "nan") {
			x, err = math.NaN(), nil // weights say what they want themselves
		}
		if err != nil || quoted || math.IsNaN(x) || math.IsInf(x, 0) {
			fix := sample(t, f)
			if p, ok := strings.CutSuffix(n.Value, "%"); ok {
				if x, e := strconv.ParseFloat(strings.TrimSpace(p), 64); e == nil && x >= 0 && x <= 100 {
					fix = strconv.FormatFloat(x/100, 'f', -1, 64)
				}
			} else if err == nil && !math.IsNaN(x) && !math.IsInf(x, 0) {
				fix = n.Value
			}
			not("a number", "write "+fix)
			return
		}
		v.SetFloat(x)
		inRange(d, at, path, n, f, x, func(s string) float64 { x, _ := strconv.ParseFloat(s, 64); return x })
	default:
		d.text(path, at, n, v, f, quoted)
	}
}

func (d *decoder) text(path string, at, n *yaml.Node, v reflect.Value, f field, quoted bool) {
	s := n.Value
	candidates, what := f.enum, "words"
	if f.known != "" {
		candidates, what = d.opt.names(f.known), plural[f.known]
	}
	switch {
	case candidates != nil && !slices.Contains(candidates, s):
		kind := "one of " + strings.Join(f.enum, ", ")
		if f.known != "" {
			kind = "a " + f.known
		}
		hint := hintFor(s, what, candidates)
		if f.known == "policy" && slices.Contains([]string{"weighted", "weights", "score", "scorers"}, snakeCase(s)) {
			hint = "write policy: {weights: {queue: 2, kv_cache: 2, prefix: 3}}"
		} else if fix := boolWord(s, candidates); fix != "" {
			hint = "write " + fix
		} else if f.known == "" && !strings.HasPrefix(hint, "did") {
			hint = "write " + sample(v.Type(), f)
		}
		d.add(at, path, show(n)+" is not "+kind, hint)
		return
	case !quoted && n.Tag != "!!str" && n.Tag != "!!timestamp" && !(f.number && n.Tag == "!!int"):
		d.add(at, path, show(n)+" is "+nounOf[n.Tag]+", not text", "write "+strconv.Quote(s))
		return
	case s == "":
		d.add(at, path, "is empty", "write a value, or remove the key")
		return
	case s != strings.TrimSpace(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		d.add(at, path, show(n)+" has white space around it or control characters in it", "write it without")
		return
	case expansion.MatchString(s):
		d.add(at, path, show(n)+" names an environment variable, which only secrets may", "write the value out")
		return
	}
	if f.path != "" && !filepath.IsAbs(s) {
		s = filepath.Join(d.dir, s)
	}
	v.SetString(s)
}

var plural = map[string]string{"dialect": "dialects", "policy": "policies", "scorer": "scorers"}

var nounOf = map[string]string{"!!int": "a number", "!!float": "a number", "!!bool": "true or false", "!!binary": "binary", "!!merge": "a merge key"}

// boolWord maps true and false to the words on and off where those are meant.
func boolWord(s string, candidates []string) string {
	for from, to := range map[string]string{"true": "on", "yes": "on", "false": "off", "no": "off"} {
		if s == from && slices.Contains(candidates, to) {
			return to
		}
	}
	return ""
}

var expansion = regexp.MustCompile(`\$\{([^}]*)\}`)

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// secret decodes text in which ${NAME} stands for an environment variable. No message shows any of it.
func (d *decoder) secret(path string, at, n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" && n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 {
		d.add(at, path, "a secret must be text", `write it in quotes, or "${NAME}" to have it from the environment`)
		return
	}
	ok := true
	s := expansion.ReplaceAllStringFunc(n.Value, func(m string) string {
		name := m[2 : len(m)-1]
		if !envName.MatchString(name) {
			d.add(at, path, "${…} does not hold the name of an environment variable", `write "${NAME}"`)
			ok = false
			return ""
		}
		val, set := d.opt.Env(name)
		if !set {
			d.add(at, path, "the environment variable "+name+" is not set", "set it, or use a file")
			ok = false
		}
		return val
	})
	if ok {
		v.Set(reflect.ValueOf(NewSecret(s)))
	}
}

// inRange complains about a value outside min and max.
func inRange[T int | float64 | time.Duration | Bytes](d *decoder, at *yaml.Node, path string, n *yaml.Node, f field, x T, parse func(string) T) {
	if f.min != "" && x < parse(f.min) || f.max != "" && x > parse(f.max) {
		fix := f.min
		if x > parse(f.max) {
			fix = f.max
		}
		d.add(at, path, fmt.Sprintf("%s is not between %s and %s", show(n), f.min, f.max), "write "+fix+" or a value in between")
	}
}

// sample is a value that could stand for a field of type t.
func sample(t reflect.Type, f field) string {
	switch {
	case t == durationType:
		return `"5s"`
	case t == bytesType:
		return `"32MiB"`
	case len(f.enum) > 0:
		return strings.Join(f.enum[:len(f.enum)-1], ", ") + " or " + f.enum[len(f.enum)-1]
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.Int && f.min != "":
		return "a number from " + f.min + " to " + f.max
	case t.Kind() == reflect.Float64 && f.max == "1":
		return "a ratio such as 0.5"
	case t.Kind() == reflect.Float64, t.Kind() == reflect.Int:
		return "a number such as 2"
	}
	return "text"
}

// show is a scalar as it stands in the file, bounded in length.
func show(n *yaml.Node) string {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind != yaml.ScalarNode {
		return describe(n)
	}
	bare := n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) == 0
	if bare && (n.Tag == "!!int" || n.Tag == "!!float" || n.Tag == "!!bool") {
		return clip(n.Value)
	}
	return strconv.Quote(clip(n.Value))
}

// clip bounds how much of a file gets into a message.
func clip(s string) string {
	const most = 100
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// printable is text without what would begin a line of its own, or take a terminal elsewhere: a file can spell that in
// places that are shown without quotes.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, s)
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	return show(n)
}

var plainKey = regexp.MustCompile(`^[^\s".\[\]]{1,100}$`)

// join appends a key to a path. Keys that could be mistaken are quoted.
func join(path, key string) string {
	if !plainKey.MatchString(key) || strings.ContainsFunc(key, func(r rune) bool { return !strconv.IsPrint(r) }) {
		key = strconv.Quote(clip(key))
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// parent is the path that path is in.
func parent(path string) string { return path[:max(0, strings.LastIndexAny(path, ".["))] }
