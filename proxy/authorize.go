package proxy

import (
	"kvgate/internal/caller"
)

// An Authorizer knows who may come in. It is safe for concurrent use.
type Authorizer interface {
	// Authorize returns who sends requests with this credential, the text after "Bearer ", or nil if it is not valid (any
	// more). It neither keeps nor logs it, and how long it takes tells nothing of valid ones.
	Authorize(credential []byte) *caller.Caller
}

// msgUnauthorized is all that is said of a credential that is missing or not valid: what is wrong with it would help to guess.
const msgUnauthorized = "a valid API key is needed; send it as Authorization: Bearer KEY"

// authenticate finds out who the request is from. It comes before the body is read, so that strangers hold no memory.
func (x *exchange) authenticate() *failure {
	a := x.routes.Auth
	if a == nil {
		return nil
	}
	var who *caller.Caller
	if credential := x.credential(); len(credential) > 0 {
		who = a.Authorize(credential)
	}
	if who == nil {
		return &failure{outcome: Unauthorized, message: msgUnauthorized}
	}
	x.caller, x.tenant, x.class = who, who.Tenant, who.Class
	return nil
}

// credential returns the client's API key or token, from the one header field that holds it; nil if there is none, or
// several, of which servers might believe another one than we do.
func (x *exchange) credential() []byte {
	var found []byte
	n := 0
	for rest := x.facts.raw; ; {
		_, name, value, next := nextField(rest)
		if len(name) == 0 {
			break
		}
		rest = next
		switch fieldNamed(name) {
		case fAuthorization:
			n++
			if len(value) > len("Bearer ") && equalFold(value[:len("Bearer ")], "bearer ") {
				found = trimSpace(value[len("Bearer "):])
			}
		case fAPIKey:
			n++
			found = value
		}
	}
	if n != 1 {
		return nil
	}
	for _, c := range found {
		if c <= ' ' || c >= 0x7f {
			return nil
		}
	}
	return found
}
