//! What `sslmode` and its files mean, with servers that have certificates.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use steadfast_pgtest::{Authority, Bouncer, Cluster, Identity};
use steadfast_store::postgres::PostgresStore;
use steadfast_store::{Store, StoreError};

const ONLY_TLS: &str = "hostssl all all 127.0.0.1/32 trust";

/// A server that is found under any name.
fn url(cluster: &Cluster, host: &str, params: &str) -> String {
    format!("postgres://steadfast@{host}:{}/postgres?hostaddr=127.0.0.1&{params}", cluster.port())
}

fn verify(mode: &str, authority: &Authority) -> String {
    format!("sslmode={mode}&sslrootcert={}", authority.root().display())
}

fn own(identity: &Identity) -> String {
    format!("sslcert={}&sslkey={}", identity.certificate.display(), identity.key.display())
}

/// Opens a store there: how many of its connections are encrypted, of how many.
fn encrypted(cluster: &Cluster, url: &str) -> (usize, usize) {
    let store = PostgresStore::open(url).unwrap_or_else(|error| panic!("{url}: {error}"));
    let _writer = store.writer().expect("it writes");
    let counts = cluster.sql(
        "select count(*) filter (where ssl), count(*) from pg_stat_ssl join pg_stat_activity using (pid)
         where application_name = 'steadfast'",
    );
    let (encrypted, all) = counts.split_once('|').expect("two counts");
    (encrypted.parse().unwrap(), all.parse().unwrap())
}

#[track_caller]
fn assert_encrypted(cluster: &Cluster, url: &str) {
    let (encrypted, all) = encrypted(cluster, url);
    assert!(all > 0 && encrypted == all, "{url}: {encrypted} of {all} connections are encrypted");
}

/// What is said instead of a connection, without what differs from run to run.
#[track_caller]
fn refused(cluster: &Cluster, url: &str, files: &[&Authority]) -> String {
    let error = PostgresStore::open(url).map(drop).expect_err(url);
    assert!(!error.may_pass(), "nothing but a change helps: {error}");
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
    assert_eq!(error.code(), "store_unavailable");
    let mut said = error.to_string().replace(&cluster.port().to_string(), "PORT");
    for authority in files {
        said = said.replace(&authority.root().display().to_string(), "ROOT");
    }
    said
}

#[test]
fn each_mode_asks_of_the_server_what_libpq_does() {
    let (ours, other, renewed) = (Authority::named("ours"), Authority::named("other"), Authority::named("ours"));
    let cluster = Cluster::start(&[]);
    cluster.serve_tls(&ours.server(&["db.test", "10.0.0.7"]), &ours, ONLY_TLS);
    for (host, params) in [
        ("db.test", verify("verify-full", &ours)),
        ("other.test", verify("verify-ca", &ours)),
        ("other.test", verify("require", &ours)),
        ("other.test", "sslmode=require".to_owned()),
        ("other.test", "ssl=true".to_owned()),
        ("other.test", "sslmode=prefer".to_owned()),
        ("other.test", "sslmode=allow".to_owned()),
        ("no_name-", "channel_binding=prefer".to_owned()),
    ] {
        assert_encrypted(&cluster, &url(&cluster, host, &params));
    }
    let said = [
        ("other.test", verify("verify-full", &ours)),
        ("127.0.0.1", verify("verify-full", &ours)),
        ("no%20name", verify("verify-full", &ours)),
        ("db.test", verify("verify-full", &other)),
        ("db.test", verify("verify-ca", &other)),
        ("db.test", verify("require", &other)),
        ("db.test", verify("verify-full", &renewed)),
        ("db.test", "sslmode=disable".to_owned()),
    ]
    .map(|(host, params)| refused(&cluster, &url(&cluster, host, &params), &[&ours, &other, &renewed]));
    insta::assert_snapshot!(said.join("\n"));
    // The socket is beside all that, and a server that takes no TLS is taken without where that is all the same.
    assert_eq!(encrypted(&cluster, &cluster.socket_url(&verify("verify-full", &other))).0, 0);
    cluster.serve_tls(&ours.server(&["db.test"]), &ours, "hostnossl all all 127.0.0.1/32 trust");
    assert_eq!(encrypted(&cluster, &url(&cluster, "db.test", "sslmode=prefer")).0, 0);
}

#[test]
fn certificates_that_do_not_hold_are_told_with_what_to_do() {
    let ours = Authority::named("ours");
    let cluster = Cluster::start(&[]);
    let plain = refused(&cluster, &url(&cluster, "db.test", "sslmode=require"), &[]);
    let old = ours.expired_server(&["db.test"]);
    cluster.serve_tls(&old, &ours, ONLY_TLS);
    let expired = refused(&cluster, &url(&cluster, "db.test", &verify("verify-full", &ours)), &[&ours]);
    let given = format!("sslmode=verify-ca&sslrootcert={}", old.certificate.display());
    assert_eq!(refused(&cluster, &url(&cluster, "db.test", &given), &[]), expired, "also where it is a root itself");
    assert_encrypted(&cluster, &url(&cluster, "db.test", "sslmode=require"));

    let own = ours.self_signed_server("db.test");
    cluster.serve_tls(&own, &ours, ONLY_TLS);
    let stranger = refused(&cluster, &url(&cluster, "db.test", &verify("verify-full", &ours)), &[&ours]);
    let pinned = format!("sslmode=verify-full&sslrootcert={}", own.certificate.display());
    let misnamed = refused(&cluster, &url(&cluster, "other.test", &pinned), &[]);
    insta::assert_snapshot!([plain, expired, stranger, misnamed].join("\n"));
    assert_encrypted(&cluster, &url(&cluster, "db.test", &pinned));
}

#[test]
fn a_client_shows_its_certificate() {
    let ours = Authority::named("ours");
    let cluster = Cluster::start(&[]);
    let hba = "hostssl all all 127.0.0.1/32 trust clientcert=verify-full";
    cluster.serve_tls(&ours.server(&["db.test"]), &ours, hba);
    let with = |more: &str| url(&cluster, "db.test", &format!("{}&{more}", verify("verify-full", &ours)));
    let steadfast = ours.client("steadfast");
    assert_encrypted(&cluster, &with(&own(&steadfast)));
    let said = [refused(&cluster, &with(""), &[]), refused(&cluster, &with(&own(&ours.client("other"))), &[])];
    insta::assert_snapshot!(said.join("\n"));

    // A new certificate in place of the old one counts for the next connection.
    let store = PostgresStore::open(&with(&own(&steadfast))).expect("it opens");
    let other = ours.client("other");
    fs::copy(&other.certificate, &steadfast.certificate).expect("a file can be copied");
    fs::copy(&other.key, &steadfast.key).expect("a file can be copied");
    let error = store.writer().map(drop).expect_err("it connects anew");
    assert!(error.to_string().contains("authentication failed"), "{error}");

    let given_away = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o644));
    given_away(&other.key).expect("a file has permissions");
    let error = PostgresStore::open(&with(&own(&other))).map(drop).expect_err("others can read the key").to_string();
    assert!(error.contains("can be used by others; chmod 0600"), "{error}");
    assert!(PostgresStore::open(&with(&format!("sslcert={}", other.certificate.display()))).is_err());
}

/// A password's proof holds for the certificate that the client has seen and for no other.
#[test]
fn a_password_is_bound_to_the_channel() {
    let ours = Authority::named("ours");
    let cluster = Cluster::start(&[]);
    cluster.sql("set password_encryption = 'scram-sha-256'; alter role steadfast password 'secret'");
    cluster.serve_tls(&ours.server(&["db.test"]), &ours, "host all all 127.0.0.1/32 scram-sha-256");
    let with = |params: &str| url(&cluster, "db.test", params).replace("steadfast@", "steadfast:secret@");
    assert_encrypted(&cluster, &with(&format!("{}&channel_binding=require", verify("verify-full", &ours))));
    assert_encrypted(&cluster, &with("sslmode=require&channel_binding=disable"));
    let said = refused(&cluster, &with("sslmode=disable&channel_binding=require"), &[]);
    assert!(said.contains("channel binding"), "{said}");
}

/// A name in the subject alone is taken from a CA that may sign for anybody; limits of a CA are judged by names in their
/// place, so that one with limits could put any name there.
#[test]
fn a_name_in_the_subject_counts_where_its_ca_has_no_limits() {
    let (free, limited) = (Authority::named("free"), Authority::for_names_below("test"));
    let cluster = Cluster::start(&[]);
    cluster.serve_tls(&free.server_by_subject("db.test"), &free, ONLY_TLS);
    assert_encrypted(&cluster, &url(&cluster, "db.test", &verify("verify-full", &free)));
    cluster.serve_tls(&limited.server(&["db.test"]), &limited, ONLY_TLS);
    assert_encrypted(&cluster, &url(&cluster, "db.test", &verify("verify-full", &limited)));
    cluster.serve_tls(&limited.server_by_subject("db.test"), &limited, ONLY_TLS);
    let said = refused(&cluster, &url(&cluster, "db.test", &verify("verify-full", &limited)), &[&limited]);
    assert!(said.contains("is for db.test alone by its subject"), "{said}");
    assert_encrypted(&cluster, &url(&cluster, "db.test", &verify("verify-ca", &limited)));
}

/// What is checked is the certificate of the pooler; how that speaks with the server is its own affair.
#[test]
fn a_pooler_speaks_tls_in_the_servers_stead() {
    let (ours, other) = (Authority::named("ours"), Authority::named("other"));
    let cluster = Cluster::start(&[]);
    let bouncer = Bouncer::start_with_tls(cluster.port(), &ours.server(&["pool.test"]));
    let url = |host: &str, params: &str| {
        format!("postgres://steadfast@{host}:{}/postgres?hostaddr=127.0.0.1&{params}", bouncer.port())
    };
    for (host, params) in [("pool.test", verify("verify-full", &ours)), ("other.test", "sslmode=require".to_owned())] {
        let store = PostgresStore::open(&url(host, &params)).unwrap_or_else(|error| panic!("{params}: {error}"));
        let mut writer = store.writer().expect("it writes");
        writer.recover().expect("it has a connection");
        assert_eq!(store.reader().next_due().expect("it looks"), None);
    }
    for (host, params) in [
        ("other.test", verify("verify-full", &ours)),
        ("pool.test", verify("verify-full", &other)),
        ("pool.test", "sslmode=disable".to_owned()),
    ] {
        let error = PostgresStore::open(&url(host, &params)).map(drop).expect_err(&params);
        assert!(!error.may_pass(), "{host} {params}: {error}");
    }
}
