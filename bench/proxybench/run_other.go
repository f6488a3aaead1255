//go:build !linux

package proxybench

import (
	"context"
	"errors"
)

// Run measures.
func Run(context.Context, Options) (*Report, error) {
	return nil, errors.New("proxies can be measured on Linux only")
}
