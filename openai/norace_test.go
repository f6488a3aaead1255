//go:build !race

package openai

// stride is 1: exhaustive tests are exhaustive.
const stride = 1
