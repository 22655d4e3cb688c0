//! `farheap doctor --seccomp`: a profile of system calls for containers in which farheap runs.
//!
//! Adds what farheap needs to a profile, mostly a runtime's default. The result has the form of the OCI runtime
//! specification, which Docker, Podman and Kubernetes read. Conditions that only the first two know are decided here, for
//! x86-64 and a container without added capabilities: Kubernetes would ignore them, and allow what they guard.

use serde_json::{Map, Value, json};

/// The calls of the library (book/src/reference/limits.md) and three others. Those that start threads and processes are left out:
/// each profile has its own conditions for them.
const CALLS: &str = "\
    capget clock_nanosleep close close_range dup3 eventfd2 exit exit_group faccessat2 fallocate fcntl fstatfs \
    ftruncate futex get_robust_list getpid getppid getpriority gettid io_uring_enter io_uring_setup ioctl ioprio_get \
    ioprio_set lseek madvise membarrier memfd_create mlock mlock2 mmap mprotect munlock munmap newfstatat open openat \
    pidfd_open pipe2 ppoll prctl pread64 preadv prlimit64 process_madvise process_vm_readv pwrite64 pwritev read \
    restart_syscall rseq rt_sigaction rt_sigprocmask rt_sigreturn sched_getaffinity sched_getscheduler \
    sched_setaffinity sched_setscheduler sched_yield set_robust_list sigaltstack statx userfaultfd wait4 write";
/// `CLONE_FILES`, the only argument of `unshare`: a forked child's thread gets descriptors of its own.
const CLONE_FILES: u64 = 0x400;
const ALLOW: &str = "SCMP_ACT_ALLOW";
/// Capabilities that containers have unless told otherwise, of those by which profiles decide.
const CAPABILITIES: &[&str] = &["CAP_AUDIT_WRITE", "CAP_SYS_CHROOT"];
const ARCHITECTURE: &str = "SCMP_ARCH_X86_64";

/// Returns what farheap needs, to be put into a profile by hand.
pub(crate) fn needed() -> Value {
    json!({ "syscalls": rules(|_, _| false) })
}

/// Rules for what is needed and not allowed already: a call, always or with arguments.
fn rules(is_allowed: impl Fn(&str, Option<&Value>) -> bool) -> Vec<Value> {
    let is_missing = |name: &&str| !is_allowed(name, None);
    let names: Vec<&str> = CALLS.split_whitespace().filter(is_missing).collect();
    let args = json!([{ "index": 0, "value": CLONE_FILES, "op": "SCMP_CMP_EQ" }]);
    let plain = (!names.is_empty()).then(|| json!({ "names": names, "action": ALLOW }));
    let is_missing = !is_allowed("unshare", Some(&args));
    let unshare = json!({ "names": ["unshare"], "action": ALLOW, "args": args });
    plain.into_iter().chain(is_missing.then_some(unshare)).collect()
}

/// Adds to a profile what it does not allow.
pub(crate) fn added_to(base: &str) -> Result<Value, String> {
    let mut profile: Map<String, Value> =
        serde_json::from_str(base).map_err(|error| format!("no profile: {error}"))?;
    let Some(Value::Array(given)) = profile.remove("syscalls") else {
        return Err("no profile: it has no list `syscalls`".to_owned());
    };
    let mut kept = Vec::new();
    for rule in given {
        kept.extend(Rule::read(rule)?);
    }
    let allows_all = profile.get("defaultAction").is_some_and(|action| action == ALLOW);
    let added = rules(|name, args| allows_all || kept.iter().any(|rule| rule.allows(name, args)));
    let kept = kept.into_iter().filter_map(Rule::without_refusals);
    let syscalls: Vec<Value> = kept.chain(added).collect();
    if let Some(Value::Array(maps)) = profile.remove("archMap") {
        let own = maps.iter().find(|map| map["architecture"] == ARCHITECTURE);
        let others = own.and_then(|map| map["subArchitectures"].as_array()).into_iter().flatten();
        let all: Vec<Value> = std::iter::once(json!(ARCHITECTURE)).chain(others.cloned()).collect();
        profile.insert("architectures".to_owned(), Value::Array(all));
    }
    profile.insert("syscalls".to_owned(), Value::Array(syscalls));
    Ok(Value::Object(profile))
}

/// A rule of a profile that holds here.
struct Rule {
    fields: Map<String, Value>,
    is_allowed: bool,
}

impl Rule {
    /// `None` for a rule whose conditions do not hold.
    fn read(rule: Value) -> Result<Option<Rule>, String> {
        let bad = |what: &str| Err(format!("no profile: {what} in a rule of `syscalls`"));
        let Value::Object(mut fields) = rule else { return bad("no object") };
        if !fields.get("names").is_some_and(Value::is_array) {
            return bad("no list `names`");
        }
        for (field, wanted) in [("includes", true), ("excludes", false)] {
            let Some(Value::Object(conditions)) = fields.remove(field) else { continue };
            for (condition, value) in conditions {
                let words: Vec<&str> =
                    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
                let holds = match condition.as_str() {
                    _ if value.is_null() || words.is_empty() && value.is_array() => continue,
                    "caps" if wanted => words.iter().all(|word| CAPABILITIES.contains(word)),
                    "caps" => words.iter().any(|word| CAPABILITIES.contains(word)),
                    "arches" => words.contains(&"amd64"),
                    // farheap's own minimum is above those of profiles.
                    "minKernel" => true,
                    _ => return bad(&format!("the unknown condition `{condition}`")),
                };
                if holds != wanted {
                    return Ok(None);
                }
            }
        }
        fields.remove("comment");
        fields.retain(|name, value| {
            name != "args" || value.as_array().is_some_and(|args| !args.is_empty())
        });
        let is_allowed = fields.get("action").is_some_and(|action| action == ALLOW);
        Ok(Some(Rule { fields, is_allowed }))
    }

    /// True if it allows a call, always or with these arguments.
    fn allows(&self, name: &str, args: Option<&Value>) -> bool {
        let own = self.fields.get("args");
        self.is_allowed && (own.is_none() || own == args) && self.names().any(|own| own == name)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.fields["names"].as_array().into_iter().flatten().filter_map(Value::as_str)
    }

    /// The rule but for what farheap needs, if it is one that refuses: a filter has one answer to a call.
    fn without_refusals(mut self) -> Option<Value> {
        if !self.is_allowed {
            let is_other = |name: &&str| {
                *name != "unshare" && CALLS.split_whitespace().all(|call| call != *name)
            };
            let names: Vec<Value> = self.names().filter(is_other).map(Value::from).collect();
            if names.is_empty() {
                return None;
            }
            self.fields.insert("names".to_owned(), Value::Array(names));
        }
        Some(Value::Object(self.fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_are_those_that_the_library_was_seen_to_make() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../book/src/reference/limits.md");
        let page = std::fs::read_to_string(path).expect("the page of the book");
        let (_, table) = page.split_once("| call | start | later |").expect("its table");
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let conditional = ["clone", "clone3", "unshare"];
        let mut made: Vec<&str> = rows.filter(|name| !conditional.contains(name)).collect();
        // Where there is no device; of jemalloc when it starts; of the library of `farheap run`.
        made.extend(["userfaultfd", "open", "mlock2"]);
        made.sort_unstable();
        assert_eq!(CALLS, made.join(" "));
    }

    /// A profile with one rule.
    fn with(default: &str, rule: Value) -> Result<Value, String> {
        added_to(&json!({ "defaultAction": default, "syscalls": [rule] }).to_string())
    }

    #[test]
    fn conditions_are_decided_for_a_container_without_added_capabilities() {
        for (field, condition, is_kept) in [
            ("includes", json!({ "caps": ["CAP_SYS_ADMIN"] }), false),
            ("includes", json!({ "caps": ["CAP_SYS_CHROOT"] }), true),
            ("includes", json!({ "arches": ["s390x"] }), false),
            ("includes", json!({ "arches": ["amd64", "x32"], "minKernel": "4.8" }), true),
            ("includes", json!({}), true),
            ("includes", Value::Null, true),
            ("excludes", json!({ "caps": ["CAP_SYS_ADMIN"] }), true),
            ("excludes", json!({ "arches": ["amd64"] }), false),
        ] {
            let rule =
                json!({ "names": ["mount"], "action": ALLOW, "comment": "", field: condition });
            let profile = with("SCMP_ACT_ERRNO", rule).expect("a profile");
            let first = &profile["syscalls"][0];
            assert_eq!(first["names"][0] == "mount", is_kept, "{field}: {profile}");
            let keys = first.as_object().expect("a rule").keys().map(String::as_str);
            assert_eq!(keys.collect::<Vec<_>>(), ["action", "names"], "{profile}");
        }
        let unknown =
            json!({ "names": ["mount"], "action": ALLOW, "includes": { "moon": "full" } });
        assert!(with("SCMP_ACT_ERRNO", unknown).expect_err("unknown").contains("`moon`"));
    }

    #[test]
    fn what_is_allowed_is_not_repeated_and_what_is_refused_is_allowed() {
        let names = json!(["ioctl", "clone3", "unshare", "userfaultfd"]);
        let refusal = json!({ "names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": 38 });
        let profile = with("SCMP_ACT_ERRNO", refusal.clone()).expect("a profile");
        assert_eq!(profile["syscalls"][0]["names"], json!(["clone3"]));
        assert_eq!(
            profile["syscalls"][1]["names"],
            json!(CALLS.split_whitespace().collect::<Vec<_>>())
        );
        assert_eq!(profile["syscalls"][2], json!(needed()["syscalls"][1]));
        let allowed = with("SCMP_ACT_ALLOW", refusal).expect("a profile");
        assert_eq!(allowed["syscalls"].as_array().map(Vec::len), Some(1), "{allowed}");
        let names: Vec<&str> = CALLS.split_whitespace().collect();
        let plain = with("SCMP_ACT_ERRNO", json!({ "names": names, "action": ALLOW, "args": [] }));
        assert_eq!(plain.expect("a profile")["syscalls"].as_array().map(Vec::len), Some(2));
        let twice = added_to(&profile.to_string()).expect("a profile");
        assert_eq!(twice, profile, "nothing is added twice");
        // One that depends on an argument allows less than all.
        let args = json!([{ "index": 1, "value": 1, "op": "SCMP_CMP_EQ" }]);
        let part = with("SCMP_ACT_ERRNO", json!({ "names": names, "action": ALLOW, "args": args }));
        assert_eq!(part.expect("a profile")["syscalls"].as_array().map(Vec::len), Some(3));
    }

    #[test]
    fn architectures_are_those_of_x86_64_and_other_texts_are_refused() {
        let map =
            |of: &str, others: Value| json!({ "architecture": of, "subArchitectures": others });
        let maps =
            [map("SCMP_ARCH_RISCV64", Value::Null), map(ARCHITECTURE, json!(["SCMP_ARCH_X86"]))];
        let base = json!({ "defaultAction": "SCMP_ACT_ERRNO", "archMap": maps, "syscalls": [] });
        let profile = added_to(&base.to_string()).expect("a profile");
        assert_eq!(profile["architectures"], json!([ARCHITECTURE, "SCMP_ARCH_X86"]));
        assert!(profile.get("archMap").is_none(), "{profile}");
        for text in ["", "[]", "{}", r#"{"syscalls":[7]}"#, r#"{"syscalls":[{"name":"read"}]}"#] {
            assert!(added_to(text).expect_err(text).starts_with("no profile: "), "{text}");
        }
    }
}
