//! The configuration as its users see it: text, environment variable, errors.
//!
//! Guards: the interface.

use crate::common::child::{case, path_of, run};
use farheap::config::{Builder, FaultMode, Limit, Wipe};
use farheap::store::MemStore;
use farheap::{ByteCount, Error, Heap, Result};
use proptest::prelude::*;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Reads and checks a text.
fn parse(text: &str) -> Result<Builder> {
    checked(Heap::builder().parse(text)?)
}

fn checked(options: Builder) -> Result<Builder> {
    options.limits().map(|_| options)
}

/// What a text is refused with.
fn refusal(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn metadata_is_local_or_far_and_not_far_where_threads_serve_themselves() {
    let defaults = parse("").expect("defaults");
    assert_eq!(defaults.get("far_metadata").as_deref(), Some("off"));
    let far = parse("far_metadata:on").expect("a value");
    assert_eq!(far, Heap::builder().far_metadata(true));
    let region = far.region().expect("checked");
    assert!(region.mode == FaultMode::Kernel && !region.inherit, "{region:?}");
    let refused = refusal("far_metadata:on,mode:in_thread");
    assert!(refused.contains("far_metadata") && refused.contains("in_thread"), "{refused}");
}

#[test]
fn every_key_is_read() {
    let options = parse(
        "far_limit:512MiB, limit:2GiB, device:/dev/nvme1n1, overwrite:on, capacity:10GiB, reserve:on,  \
         handlers:3, threshold:off, span:2TiB, checksum:off, deadline:1m30s, \
         poll:50us, readahead:off, mode:in_thread, encrypt:on, wipe:zero",
    )
    .expect("every key");
    let expected = Heap::builder()
        .far_limit(ByteCount::mib(512))
        .limit(ByteCount::gib(2))
        .device("/dev/nvme1n1")
        .overwrite(true)
        .capacity(ByteCount::gib(10))
        .reserve(true)
        .handlers(3)
        .threshold(None)
        .span(ByteCount::gib(2048))
        .checksum(false)
        .deadline(Duration::from_secs(90))
        .poll(Duration::from_micros(50))
        .readahead(false)
        .mode(FaultMode::InThread)
        .encrypt(true)
        .wipe(Wipe::Zero);
    assert_eq!(options, expected);
    let limits = options.limits().expect("checked");
    assert_eq!(limits, (Some(ByteCount::gib(2)), ByteCount::mib(512)));
    let region = options.region().expect("checked");
    assert_eq!((region.limit, region.span), (ByteCount::mib(512), ByteCount::gib(2048)));
    assert_eq!((region.handlers, region.checksum, region.readahead), (3, false, false));
    assert_eq!((region.mode, region.wipe), (FaultMode::InThread, Wipe::Zero));
    assert_eq!(region.deadline, Duration::from_secs(90));
    assert_eq!(options.get("device").as_deref(), Some("/dev/nvme1n1"));
    assert_eq!(options.get("threshold").as_deref(), Some("off"));
    assert_eq!((options.get("dir"), options.get("page")), (None, None));
}

#[test]
fn defaults_are_as_documented() {
    let config = parse("").expect("defaults");
    assert_eq!(
        config.to_string(),
        "limit:auto,far_limit:auto,overwrite:off,reserve:off,threshold:64KiB,handlers:auto,span:1TiB,\
         checksum:on,deadline:30s,poll:200us,readahead:on,\
         mode:auto,encrypt:off,wipe:off,far_metadata:off,node:any,check:off"
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
        ("span:0", "span", "to 7 TiB"),
        ("span:8TiB", "span", "to 7 TiB"),
        ("span:16MiB,far_limit:32MiB", "span", "less than the limit"),
        ("checksum:yes", "checksum", "not one of on, off"),
        ("deadline:soon", "deadline", "not a duration"),
        ("deadline:0s", "deadline", "must be from"),
        ("deadline:2days", "deadline", "must be from"),
        ("poll:1ms", "poll", "at most 500us"),
        ("poll:no", "poll", "not a duration"),
        ("mode:on", "mode", "not one of auto, user, kernel, in_thread"),
        ("far_metadata:on,mode:in_thread", "far_metadata", "conflicts with `mode:in_thread`"),
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
        ("handlers:4,,mode:auto", Builder::ENV, "a comma too many"),
        ("handlers:4,", Builder::ENV, "a comma too many"),
        (",", Builder::ENV, "a comma too many"),
    ] {
        let message = refusal(text);
        assert!(message.starts_with(&format!("configuration: {key}: ")), "{text}: {message}");
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn a_limit_must_be_eight_mebibytes() {
    let error = parse("far_limit:8191KiB").expect_err("too little");
    let minimum = ByteCount::mib(8);
    assert!(matches!(error, Error::LimitTooSmall { minimum: m, .. } if m == minimum), "{error}");
    assert!(parse("far_limit:8MiB").is_ok());
}

#[test]
fn the_builder_refuses_what_the_text_refuses() {
    for builder in [
        Heap::builder().limit(ByteCount::ZERO),
        Heap::builder().limit(Limit::Percent(0)),
        Heap::builder().limit(Limit::Percent(101)),
        Heap::builder().far_limit(ByteCount::ZERO),
        Heap::builder().capacity(ByteCount(u64::MAX)),
        Heap::builder().handlers(65),
        Heap::builder().span(ByteCount(u64::MAX)),
        Heap::builder().deadline(Duration::MAX),
        Heap::builder().device(""),
        Heap::builder().device("/dev/a\0b"),
        Heap::builder().device("/dev/sda").dir("/tmp"),
    ] {
        let error = builder.limits().expect_err("an invalid option");
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
    let options = parse(r#"device:/dev/disk/by-path/pci-0000:00:1f.2,far_limit:1GiB"#);
    let options = options.expect("colons need no quotes");
    assert_eq!(options.get("device").as_deref(), Some("/dev/disk/by-path/pci-0000:00:1f.2"));
    let options = parse(r#"far_limit:1GiB,dir: "/mnt/a, ""b""" "#).expect("quoted");
    assert_eq!(options.get("dir").as_deref(), Some(r#"/mnt/a, "b""#));
}

#[test]
fn a_text_overlays_what_the_builder_has() {
    let base = Heap::builder().far_limit(ByteCount::mib(64)).dir("/var/tmp").handlers(2);
    let config = base.clone().parse("far_limit:128MiB,handlers:auto").and_then(checked);
    let config = config.expect("an overlay");
    assert_eq!(config.limits().expect("checked").1, ByteCount::mib(128));
    assert_eq!(config.get("dir").as_deref(), Some("/var/tmp"));
    assert_eq!(config.get("handlers").as_deref(), Some("auto"));
    let config = base.parse("device:/dev/sdb").and_then(checked).expect("no conflict");
    assert_eq!((config.get("device").as_deref(), config.get("dir")), (Some("/dev/sdb"), None));
}

/// Set for this test's child process, which then prints what it reads.
#[test]
fn the_environment_variable_is_read_and_its_absence_means_the_defaults() {
    const TEST: &str = "the_environment_variable_is_read_and_its_absence_means_the_defaults";
    if case(TEST).is_some() {
        match Heap::builder().from_env().and_then(checked) {
            Ok(config) => println!("read: {config}"),
            Err(error) => println!("refused: {error}"),
        }
        return;
    }
    // A process of its own per value: changing this one's environment would race other tests.
    let child = |value: Option<&str>| {
        let prepare = |command: &mut Command| {
            command.env_remove(Builder::ENV).envs(value.map(|value| (Builder::ENV, value)));
        };
        run(TEST, "", prepare).text
    };
    let defaults = parse("").expect("defaults").to_string();
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
        span in 6u64 << 40..=7 << 40,
        deadline_ns in 1_000_000u64..=86_400_000_000_000,
        poll_ns in proptest::option::of(0u64..=500_000),
        (checksum, readahead) in any::<(bool, bool)>(),
        mode in prop_oneof![
            Just(FaultMode::Auto),
            Just(FaultMode::User),
            Just(FaultMode::Kernel),
            Just(FaultMode::InThread),
        ],
        (encrypt, reserve) in any::<(bool, bool)>(),
        wipe in prop_oneof![Just(Wipe::Off), Just(Wipe::Discard), Just(Wipe::Zero)],
    ) -> Builder {
        let builder = match limit {
            Ok(bytes) => Heap::builder().limit(ByteCount(bytes)),
            Err(percent) => Heap::builder().limit(Limit::Percent(percent)),
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
            .readahead(readahead)
            .mode(mode)
            .encrypt(encrypt)
            .wipe(wipe)
    }
}

proptest! {
    #[test]
    fn what_a_configuration_prints_reads_back_as_the_same(builder in builders()) {
        let config = checked(builder).expect("generated options are valid");
        let text = config.to_string();
        prop_assert_eq!(parse(&text).expect(&text), config);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in r#"([a-z_]{1,9}|limit|page|dir|mode)[:,"%a-zA-Z0-9 ]{0,24}"#) {
        let _ = parse(&text);
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
        let config = Heap::builder().from_env().and_then(checked);
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
        .env(Builder::ENV, "limit:9MiB,device:/root/precious,overwrite:on,nonsense")
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
