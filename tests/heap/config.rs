//! The configuration as its users see it: text, environment variable, errors.
//!
//! Guards: the interface.

use crate::common::child::{case, path_of, run};
use farheap::config::{Builder, FaultMode, Limit, Metadata, UserMode, Wipe};
use farheap::store::MemStore;
use farheap::{ByteCount, Config, Error, Heap};
use proptest::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// What a text is refused with.
fn refusal(text: &str) -> String {
    Config::parse(text).expect_err(text).to_string()
}

#[test]
fn metadata_is_local_or_far_and_not_far_where_threads_serve_themselves() {
    assert_eq!(Config::parse("").expect("defaults").metadata(), Metadata::Local);
    let far = Config::parse("metadata:far").expect("a value");
    assert_eq!(far.metadata(), Metadata::Far);
    assert!(far.to_string().contains("metadata:far"), "{far}");
    let refused = refusal("metadata:far,mode:in_thread");
    assert!(refused.contains("metadata") && refused.contains("in_thread"), "{refused}");
}

#[test]
fn every_key_is_read() {
    let config = Config::parse(
        "far_limit:512MiB, limit:2GiB, device:/dev/nvme1n1, overwrite:on, capacity:10GiB, reserve:on,  \
         handlers:3, threshold:off, span:2TiB, checksum:off, deadline:1m30s, \
         poll:50us, user_mode:far, readahead:off, mode:in_thread, encrypt:on, wipe:zero",
    )
    .expect("every key");
    assert_eq!(config.far_limit(), ByteCount::mib(512));
    assert_eq!(config.limit(), Some(ByteCount::gib(2)));
    assert_eq!(config.device(), Some(Path::new("/dev/nvme1n1")));
    assert_eq!(config.dir(), None);
    assert!(config.overwrite());
    assert_eq!(config.capacity(), Some(ByteCount::gib(10)));
    assert!(config.reserve());
    assert_eq!(config.handlers(), Some(3));
    assert_eq!(config.threshold(), None);
    assert_eq!(config.span(), ByteCount::gib(2048));
    assert!(!config.checksum());
    assert_eq!(config.deadline(), Duration::from_secs(90));
    assert_eq!(config.poll(), Some(Duration::from_micros(50)));
    assert_eq!(config.user_mode(), UserMode::Far);
    assert!(!config.readahead());
    assert_eq!(config.mode(), FaultMode::InThread);
    assert!(config.encrypt());
    assert_eq!(config.wipe(), Wipe::Zero);
}

#[test]
fn defaults_are_as_documented() {
    let config = Config::parse("").expect("defaults");
    assert_eq!(
        config.to_string(),
        "limit:auto,far_limit:auto,overwrite:off,reserve:off,threshold:64KiB,handlers:auto,span:1TiB,\
         checksum:on,deadline:30s,poll:200us,user_mode:auto,readahead:on,\
         mode:handler,encrypt:off,wipe:off,metadata:local,node:any,check:off"
    );
}

#[test]
fn an_unknown_key_is_named_with_the_likely_one() {
    let message = refusal("far_limit:64MiB,hanlders:4");
    assert_eq!(message, "configuration: hanlders: is not a key; did you mean `handlers`?");
    assert!(refusal("Limit:64MiB").contains("did you mean `limit`?"));
    assert!(refusal("limits").contains("did you mean `limit`?"));
    assert_eq!(refusal("xyzzy:1"), "configuration: xyzzy: is not a key");
    assert_eq!(refusal("limit=64MiB"), "configuration: limit: takes a colon; write `limit:64MiB`");
}

#[test]
fn a_malformed_value_is_refused_with_its_key() {
    for (text, key, part) in [
        ("limit:lots", "limit", "`lots` is not a size"),
        ("limit:0", "limit", "must not be zero"),
        ("limit:0%", "limit", "not from 1% to 100%"),
        ("limit:101%", "limit", "not from 1% to 100%"),
        ("limit:300%", "limit", "not a whole percentage"),
        ("limit:-5%", "limit", "not a whole percentage"),
        ("limit:99999999999TiB", "limit", "is too large"),
        ("capacity:0", "capacity", "at least one page"),
        ("capacity:9223372036854775808", "capacity", "at most"),
        ("handlers:0", "handlers", "from 1 to 64"),
        ("handlers:65", "handlers", "from 1 to 64"),
        ("handlers:many", "handlers", "`many`"),
        ("span:0", "span", "to 64 TiB"),
        ("span:65TiB", "span", "to 64 TiB"),
        ("span:16MiB,far_limit:32MiB", "span", "less than the limit"),
        ("checksum:yes", "checksum", "not one of on, off"),
        ("deadline:soon", "deadline", "not a duration"),
        ("deadline:0s", "deadline", "must be from"),
        ("deadline:2days", "deadline", "must be from"),
        ("poll:1ms", "poll", "at most 500us"),
        ("poll:no", "poll", "not a duration"),
        ("user_mode:on", "user_mode", "not one of auto, far, require_kernel"),
        ("user_mode:require_kernel,mode:in_thread", "user_mode", "conflicts with `mode:in_thread`"),
        ("encrypt:yes", "encrypt", "not one of on, off"),
        ("wipe:zeros", "wipe", "did you mean `zero`?"),
        ("reserve:yes", "reserve", "not one of on, off"),
        ("reserve:on", "reserve", "needs `capacity`"),
        ("reserve:on,dir:/a", "reserve", "needs `capacity`"),
        ("mode:inthread", "mode", "did you mean `in_thread`?"),
        ("device:", "device", "the value is empty"),
        ("device:\"\"", "device", "the value is empty"),
        ("device:\"/a", "device", "closing quote"),
        ("device:\"/a\"b", "device", "expected a comma"),
        ("device:/a,dir:/b", "dir", "conflicts with `device`"),
        ("limit", "limit", "has no value"),
        ("handlers:4,handlers:4", "handlers", "given twice"),
        ("handlers:4,,mode:handler", Config::ENV, "a comma too many"),
        ("handlers:4,", Config::ENV, "a comma too many"),
        (",", Config::ENV, "a comma too many"),
    ] {
        let message = refusal(text);
        assert!(message.starts_with(&format!("configuration: {key}: ")), "{text}: {message}");
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn a_limit_must_be_eight_mebibytes() {
    let error = Config::parse("far_limit:8191KiB").expect_err("too little");
    let minimum = ByteCount::mib(8);
    assert!(matches!(error, Error::LimitTooSmall { minimum: m, .. } if m == minimum), "{error}");
    assert!(Config::parse("far_limit:8MiB").is_ok());
}

#[test]
fn the_builder_refuses_what_the_text_refuses() {
    for builder in [
        Config::builder().limit(ByteCount::ZERO),
        Config::builder().limit(Limit::Percent(0)),
        Config::builder().limit(Limit::Percent(101)),
        Config::builder().far_limit(ByteCount::ZERO),
        Config::builder().capacity(ByteCount(u64::MAX)),
        Config::builder().handlers(65),
        Config::builder().span(ByteCount(u64::MAX)),
        Config::builder().deadline(Duration::MAX),
        Config::builder().device(""),
        Config::builder().device("/dev/a\0b"),
        Config::builder().device("/dev/sda").dir("/tmp"),
    ] {
        let error = builder.clone().build().expect_err("an invalid option");
        assert!(matches!(error, Error::Config { .. }), "{builder:?}: {error}");
    }
}

#[test]
fn a_store_of_the_programs_own_conflicts_with_options_that_open_one() {
    for text in
        ["device:/dev/sda", "overwrite:on", "dir:/tmp", "capacity:1GiB", "capacity:1GiB,reserve:on"]
    {
        let options = Heap::builder().parse(&format!("far_limit:8MiB,{text}")).expect(text);
        let store = Arc::new(MemStore::new(ByteCount::mib(16)).expect("address space"));
        let error = options.store(store).start().expect_err(text).to_string();
        assert!(error.contains("conflicts with the program's own store"), "{text}: {error}");
    }
}

#[test]
fn paths_may_hold_colons_and_quoted_ones_commas() {
    let config = Config::parse(r#"device:/dev/disk/by-path/pci-0000:00:1f.2,far_limit:1GiB"#);
    let config = config.expect("colons need no quotes");
    assert_eq!(config.device(), Some(Path::new("/dev/disk/by-path/pci-0000:00:1f.2")));
    let config = Config::parse(r#"far_limit:1GiB,dir: "/mnt/a, ""b""" "#).expect("quoted");
    assert_eq!(config.dir(), Some(Path::new(r#"/mnt/a, "b""#)));
}

#[test]
fn a_text_overlays_what_the_builder_has() {
    let base = Config::builder().far_limit(ByteCount::mib(64)).dir("/var/tmp").handlers(2);
    let config = base.clone().parse("far_limit:128MiB,handlers:auto").and_then(Builder::build);
    let config = config.expect("an overlay");
    assert_eq!(config.far_limit(), ByteCount::mib(128));
    assert_eq!(config.dir(), Some(Path::new("/var/tmp")));
    assert_eq!(config.handlers(), None);
    let config = base.parse("device:/dev/sdb").and_then(Builder::build).expect("no conflict");
    assert_eq!((config.device(), config.dir()), (Some(Path::new("/dev/sdb")), None));
}

/// Set for this test's child process, which then prints what it reads.
#[test]
fn the_environment_variable_is_read_and_its_absence_means_the_defaults() {
    const TEST: &str = "the_environment_variable_is_read_and_its_absence_means_the_defaults";
    if case(TEST).is_some() {
        match Config::builder().from_env().and_then(Builder::build) {
            Ok(config) => println!("read: {config}"),
            Err(error) => println!("refused: {error}"),
        }
        return;
    }
    // A process of its own per value: changing this one's environment would race other tests.
    let child = |value: Option<&str>| {
        let prepare = |command: &mut Command| {
            command.env_remove(Config::ENV).envs(value.map(|value| (Config::ENV, value)));
        };
        run(TEST, "", prepare).text
    };
    let defaults = Config::parse("").expect("defaults").to_string();
    assert!(child(None).contains(&format!("read: {defaults}")));
    assert!(
        child(Some("limit:96MiB"))
            .contains("read: limit:96MiB,far_limit:auto,overwrite:off,reserve:off,")
    );
    assert!(child(Some("limt:96MiB")).contains("refused: configuration: limt: is not a key"));
}

/// Paths of every character that means something to the text form.
fn paths() -> impl Strategy<Value = String> {
    proptest::string::string_regex(r#"/[a-z,:" \\%=é]{0,12}"#).expect("a valid expression")
}

prop_compose! {
    fn builders()(
        limit in prop_oneof![
            (1u64 << 27..1 << 40).prop_map(Ok),
            (50u8..=100).prop_map(Err),
        ],
        store in prop_oneof![
            Just((None, None)),
            paths().prop_map(|path| (Some(path), None)),
            paths().prop_map(|path| (None, Some(path))),
        ],
        capacity in proptest::option::of(1u64 << 21..=i64::MAX as u64),
        handlers in proptest::option::of(1u16..=64),
        threshold in proptest::option::of(0u64..1 << 62),
        span in 1u64 << 45..=1 << 46,
        deadline_ns in 1_000_000u64..=86_400_000_000_000,
        poll_ns in proptest::option::of(0u64..=500_000),
        (checksum, readahead) in any::<(bool, bool)>(),
        (user_mode, mode) in prop_oneof![
            Just((UserMode::Auto, FaultMode::Handler)),
            Just((UserMode::Far, FaultMode::InThread)),
            Just((UserMode::RequireKernel, FaultMode::Handler)),
        ],
        (encrypt, reserve) in any::<(bool, bool)>(),
        wipe in prop_oneof![Just(Wipe::Off), Just(Wipe::Discard), Just(Wipe::Zero)],
    ) -> Builder {
        let builder = match limit {
            Ok(bytes) => Config::builder().limit(ByteCount(bytes)),
            Err(percent) => Config::builder().limit(Limit::Percent(percent)),
        };
        let builder = match store {
            (Some(device), _) => builder.device(device),
            (_, Some(dir)) => builder.dir(dir),
            _ => builder,
        };
        builder
            .capacity(capacity.map(ByteCount))
            .reserve(reserve && capacity.is_some())
            .handlers(handlers)
            .threshold(threshold.map(ByteCount))
            .span(ByteCount(span))
            .checksum(checksum)
            .deadline(Duration::from_nanos(deadline_ns))
            .poll(poll_ns.map(Duration::from_nanos))
            .user_mode(user_mode)
            .readahead(readahead)
            .mode(mode)
            .encrypt(encrypt)
            .wipe(wipe)
    }
}

proptest! {
    #[test]
    fn what_a_configuration_prints_reads_back_as_the_same(builder in builders()) {
        let config = builder.build().expect("generated options are valid");
        let text = config.to_string();
        prop_assert_eq!(Config::parse(&text).expect(&text), config);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in r#"([a-z_]{1,9}|limit|page|dir|mode)[:,"%a-zA-Z0-9 ]{0,24}"#) {
        let _ = Config::parse(&text);
    }
}

/// A copy of this program belongs to root, has the set-user-ID bit, and is run by nobody.
#[test]
fn a_program_with_more_rights_than_its_caller_ignores_the_variable() {
    const CHILD: &str = "FARHEAP_TEST_SET_USER_ID";
    const NOBODY: u32 = 65_534;
    if std::env::var_os(CHILD).is_some() {
        let text = std::fs::read_to_string("/proc/self/status").expect("its own status");
        let users = text.lines().find(|line| line.starts_with("Uid:")).expect("users");
        let config = Config::builder().from_env().and_then(Builder::build);
        let config = config.expect("what is in the variable is no error");
        return println!("as {:?}: {config}", users.split_whitespace().collect::<Vec<_>>());
    }
    if std::fs::metadata("/proc/self").expect("itself").uid() != 0 {
        return println!("skipped: only root makes a program that runs as root");
    }
    let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let program = dir.path().join("program");
    // By a process of its own: what a child of another test has open for writing cannot be run.
    let mut copy = Command::new("cp");
    copy.arg(std::env::current_exe().expect("a path")).arg(&program);
    assert!(copy.status().expect("cp runs").success());
    for (path, mode) in [(dir.path(), 0o755), (&program, 0o4755)] {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
    }
    let output = Command::new(&program)
        .args([
            path_of("a_program_with_more_rights_than_its_caller_ignores_the_variable"),
            "--exact",
            "--nocapture",
        ])
        .env(CHILD, "1")
        .env(Config::ENV, "limit:9MiB,device:/root/precious,overwrite:on,nonsense")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("it runs");
    let [out, said] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    if out.contains(r#"as ["Uid:", "65534", "65534""#) {
        return println!("skipped: /var/tmp is mounted with nosuid");
    }
    assert!(output.status.success() && out.contains(r#"as ["Uid:", "65534", "0""#), "{out} {said}");
    assert!(!out.contains("9MiB") && !out.contains("precious"), "{out}");
    assert_eq!(said.matches("farheap: FARHEAP_CONF is ignored").count(), 1, "{said}");
}
