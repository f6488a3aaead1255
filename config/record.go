package config

import (
	_ "embed"
	"time"
)

//go:embed record.go
var recordSource string

func init() { sources = append(sources, recordSource) }

// Record has what is worth knowing of finished requests written into a file, for `kvgate replay`.
type Record struct {
	// File gets a line of JSON per request: its time, sizes and how it was served, ids of its prompt's blocks that say only
	// whether two prompts begin alike, and no text. A reload opens it anew.
	File string `yaml:"file" example:"/var/lib/kvgate/record.jsonl" path:"any"`
	// MaxBytes is the size above which the file is renamed, to end in .1, and a new one begun.
	MaxBytes Bytes `yaml:"max_bytes" min:"64KiB" max:"1024GiB"`
	// Keep is how many of those files are kept besides the one that is written.
	Keep int `yaml:"keep" min:"0" max:"1000"`
	// Sample is the share of time that is recorded, 0..1, in whole windows: within one, everything is.
	Sample float64 `yaml:"sample" min:"0.001" max:"1"`
	// Window is how long those are.
	Window time.Duration `yaml:"window" min:"1s" max:"24h"`
	// Tenants has the names of tenants recorded.
	Tenants bool `yaml:"tenants"`
}

func (r *Record) setDefaults(*Config) {
	*r = Record{MaxBytes: 256 << 20, Keep: 8, Sample: 1, Window: 5 * time.Minute}
}

// record checks the section record.
func (d *decoder) record() {
	if r := d.root.Record; r != nil && r.File == "" && !d.bad["record"] && !d.bad["record.file"] {
		d.wrong("record", "has no file", `write file: "/var/lib/kvgate/record.jsonl"`)
	}
}
