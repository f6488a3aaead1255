package config

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Bytes is a size. In a file it is a number and a unit: B, KiB, MiB, GiB, TiB (1024) or kB, KB, MB, GB, TB (1000).
type Bytes int64

var byteUnits = []struct {
	name string
	size float64
	word string // how its long name begins, to understand "megabytes"
}{
	{"TiB", 1 << 40, "ter"},
	{"GiB", 1 << 30, "gig"},
	{"MiB", 1 << 20, "meg"},
	{"KiB", 1 << 10, "kil"},
	{"TB", 1e12, ""},
	{"GB", 1e9, ""},
	{"MB", 1e6, ""},
	{"kB", 1e3, ""},
	{"KB", 1e3, ""},
	{"B", 1, "byte"},
}

// String is the shortest exact spelling: "32MiB", "1000B".
func (b Bytes) String() string {
	for _, u := range byteUnits[:4] {
		if size := Bytes(u.size); b != 0 && b%size == 0 {
			return strconv.FormatInt(int64(b/size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(b), 10) + "B"
}

// maxBytes keeps sizes where float64 is exact.
const maxBytes = 1 << 53

// parseBytes reads a size. If s is not one, fix is what was probably meant.
func parseBytes(s string) (b Bytes, fix string) {
	num, unit := splitUnit(s)
	v, err := strconv.ParseFloat(num, 64)
	if err != nil || v > maxBytes {
		return 0, "32MiB"
	}
	for _, u := range byteUnits {
		if unit == u.name {
			if n := v * u.size; n <= maxBytes && n == math.Trunc(n) {
				return Bytes(n), ""
			}
			return 0, "32MiB"
		}
	}
	// A bare number from 1024 up counts bytes.
	unit = strings.ToLower(strings.TrimSpace(unit))
	if unit == "" && v >= 1024 && v == math.Trunc(v) {
		return 0, Bytes(v).String()
	}
	if unit == "" {
		return 0, num + "MiB"
	}
	for _, u := range byteUnits {
		name := strings.ToLower(u.name)
		if unit == name || unit == name[:1] || unit == name[:1]+"i" || u.word != "" && strings.HasPrefix(unit, u.word) {
			return 0, num + u.name
		}
	}
	return 0, "32MiB"
}

// ParseBytes reads a size as it is written in a file, or says what was probably meant.
func ParseBytes(s string) (Bytes, error) {
	b, fix := parseBytes(s)
	if fix != "" {
		return 0, fmt.Errorf("%q is not a size; write %q", clip(s), fix)
	}
	return b, nil
}

// splitUnit cuts "32 MiB" into "32" and "MiB". A blank between the two stays with the unit, so that it is refused.
func splitUnit(s string) (num, unit string) {
	i := 0
	for i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] == '.') {
		i++
	}
	return s[:i], s[i:]
}

var looseDuration = regexp.MustCompile(`^\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*$`)

// parseDuration reads a duration. If s is not one, fix is what was probably meant.
func parseDuration(s string) (d time.Duration, fix string) {
	if d, err := time.ParseDuration(s); err == nil && d >= 0 && strings.TrimLeft(s, "0") != "" {
		return d, ""
	}
	guess := "5s"
	if m := looseDuration.FindStringSubmatch(s); m != nil {
		num, unit := m[1], strings.ToLower(m[2])
		switch {
		case unit == "ms" || strings.HasPrefix(unit, "milli"):
			guess = num + "ms"
		case unit == "" || strings.HasPrefix(unit, "s"):
			guess = num + "s"
		case strings.HasPrefix(unit, "m"):
			guess = num + "m"
		case strings.HasPrefix(unit, "h"):
			guess = num + "h"
		case strings.HasPrefix(unit, "d"):
			if v, err := strconv.ParseFloat(num, 64); err == nil && v < 1e4 {
				guess = strconv.FormatFloat(v*24, 'f', -1, 64) + "h"
			}
		}
		if _, err := time.ParseDuration(guess); err != nil {
			guess = "5s"
		}
	}
	return 0, guess
}

// formatDuration is the spelling without zero parts: "2m", not "2m0s".
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
