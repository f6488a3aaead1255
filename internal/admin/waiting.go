package admin

// A WaitingView is what waits for admission of one pool and class.
type WaitingView struct {
	Pool    string `json:"pool"`
	Class   string `json:"class"`
	Waiting int64  `json:"waiting"` // requests
	Tokens  int64  `json:"tokens"`  // of them, prompts and expected outputs
	Refused uint64 `json:"refused"` // since the start
	// Tenants are those with most waiting, and the others added up; none where all requests are of nobody in particular.
	Tenants []WaitingTenant `json:"tenants,omitempty"`
}

// A WaitingTenant is what waits of one tenant in a class.
type WaitingTenant struct {
	Tenant  string `json:"tenant"`           // "" is nobody in particular
	Others  int    `json:"others,omitempty"` // how many tenants these are, where it is more than the one that is named
	Waiting int    `json:"waiting"`
	Tokens  int64  `json:"tokens"`
}
