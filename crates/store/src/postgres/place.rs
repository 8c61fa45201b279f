//! Place: which database, and how we speak to it.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host as Named, SslMode};

use super::tls::{self, Tls};
use crate::contract::StoreError;

/// How long a connection may take to be made.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// The longest name of a schema: the longest of our own names fits behind it in what PostgreSQL keeps of a name.
const SCHEMA_BYTES_MAX: usize = 40;
/// Committers of one process: two use a second core, more get in each other's way.
const COMMITTERS: usize = 2;
/// Connections for looks.
const LOOKS: usize = 4;

/// Whether statements are prepared once a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prepared {
    /// When the server sees this very connection, and not that of a pooler.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// One host of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    /// A name, an address, or the folder of a socket.
    pub name: String,
    /// Where it is, when the URL says that too: the name is then only shown.
    pub address: Option<IpAddr>,
    pub port: u16,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.port)
    }
}

/// How a peer that is silently gone is noticed; `None` leaves it to the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keepalive {
    /// Whether a quiet connection is asked at all.
    pub asks: bool,
    /// How long it has to be quiet.
    pub idle: Option<Duration>,
    /// Between two questions.
    pub interval: Option<Duration>,
    /// So many without an answer are the end.
    pub count: Option<u32>,
    /// How long what was sent may stay without a receipt.
    pub unanswered: Option<Duration>,
}

impl Default for Keepalive {
    /// Within seconds.
    fn default() -> Self {
        Self {
            asks: true,
            idle: Some(Duration::from_secs(5)),
            interval: Some(Duration::from_secs(2)),
            count: Some(3),
            unanswered: Some(Duration::from_secs(15)),
        }
    }
}

impl Keepalive {
    /// Takes a setting of libpq's name and meaning, where 0 leaves it to the system; false when it is none of these.
    fn set(&mut self, name: &str, value: &str) -> Result<bool, StoreError> {
        let seconds = || Ok::<_, StoreError>(nonzero(between(name, value, 0..=32_767)?).map(Duration::from_secs));
        match name {
            "keepalives" => self.asks = between(name, value, 0..=1)? == 1,
            "keepalives_idle" => self.idle = seconds()?,
            "keepalives_interval" => self.interval = seconds()?,
            "keepalives_count" | "keepalives_retries" => self.count = nonzero(between(name, value, 0..=127)?),
            "tcp_user_timeout" => {
                self.unanswered = nonzero(between(name, value, 0..=3_600_000)?).map(Duration::from_millis);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// What others can be asked to do that is done in one way here: the values that mean this way, and why.
const SETTLED: [(&str, &[&str], &str); 7] = [
    ("target_session_attrs", &["read-write", "primary", "any"], "only a server that takes writes is of use"),
    ("load_balance_hosts", &["disable"], "every host is looked at, and the one that takes writes is used"),
    ("sslnegotiation", &["postgres"], "a server is asked first whether it can"),
    ("sslsni", &["1"], "the server is told which name is wanted"),
    ("sslcompression", &["0"], "nothing is compressed"),
    (
        "ssl_min_protocol_version",
        &["TLSv1", "TLSv1.1", "TLSv1.2"],
        "TLS 1.2 and 1.3 are spoken, the newer where both can",
    ),
    ("gssencmode", &["disable", "prefer"], "connections are not encrypted by GSSAPI"),
];

/// A store's place in a PostgreSQL database, read from a URL.
///
/// Beside what PostgreSQL's own URLs hold (several hosts, `connect_timeout`, `application_name`, ..) it may say
/// `schema=NAME` (`steadfast` unless told), `prepared=auto|on|off`, `committers=N`, `looks=N` and `partitions=N`.
#[derive(Clone)]
pub struct Place {
    pub(super) config: Config,
    pub(super) tls: Tls,
    pub(super) keepalive: Keepalive,
    pub(super) schema: String,
    pub(super) prepared: Prepared,
    pub(super) committers: usize,
    /// The URL says how many.
    pub(super) committers_told: bool,
    pub(super) looks: usize,
    /// Into how many the logs and receipts of a store that is made here are hashed.
    pub(super) partitions: Option<u32>,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the password.
        write!(f, "{self}")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("postgres://")?;
        for (n, host) in self.hosts().into_iter().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            write!(f, "{comma}{host}")?;
        }
        write!(f, "/{}?schema={}", self.config.get_dbname().unwrap_or_default(), self.schema)
    }
}

/// True for a URL that names a PostgreSQL database.
pub fn is_postgres(url: &str) -> bool {
    url.starts_with("postgres://") || url.starts_with("postgresql://")
}

impl Place {
    /// Reads a URL.
    ///
    /// # Errors
    /// [`StoreError::Place`] naming what is wrong with it.
    pub fn parse(url: &str) -> Result<Self, StoreError> {
        let bad = |problem: String| StoreError::Place { problem };
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut place = Self {
            config: Config::new(),
            tls: Tls::default(),
            keepalive: Keepalive::default(),
            schema: "steadfast".to_owned(),
            prepared: Prepared::Auto,
            committers: COMMITTERS,
            committers_told: false,
            looks: LOOKS,
            partitions: None,
        };
        let (mut theirs, mut tls) = (Vec::new(), tls::Settings::default());
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "schema" => place.schema = schema(value)?,
                "prepared" => {
                    place.prepared = match value {
                        "auto" => Prepared::Auto,
                        "on" => Prepared::On,
                        "off" => Prepared::Off,
                        _ => return Err(bad(format!("prepared is {value}; give auto, on or off"))),
                    };
                }
                "committers" => {
                    place.committers = between(name, value, 1..=16)?;
                    place.committers_told = true;
                }
                "partitions" => place.partitions = Some(between(name, value, 2..=1_024)?),
                "looks" => place.looks = between(name, value, 1..=64)?,
                _ if tls.set(name, value).map_err(bad)? => {}
                _ if place.keepalive.set(name, value)? || is_settled(name, value)? => {}
                _ => theirs.push(pair),
            }
        }
        let rest = if theirs.is_empty() { base.to_owned() } else { format!("{base}?{}", theirs.join("&")) };
        place.config = Config::from_str(&rest).map_err(|error| {
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            bad(format!("{why}; give postgres://USER:PASSWORD@HOST:PORT/DATABASE?schema=NAME"))
        })?;
        place.tls = tls.try_into().map_err(bad)?;
        // Unless a try says otherwise.
        place.config.ssl_mode(SslMode::Disable);
        place.count_hosts()?;
        if place.config.get_application_name().is_none() {
            place.config.application_name("steadfast");
        }
        Ok(place)
    }

    /// Checks that every host has what it needs.
    fn count_hosts(&self) -> Result<(), StoreError> {
        let (names, addresses) = (self.config.get_hosts().len(), self.config.get_hostaddrs().len());
        let (hosts, ports) = (names.max(addresses), self.config.get_ports().len());
        let is_list = |name: &Named| matches!(name, Named::Tcp(name) if name.contains(','));
        let problem = if self.config.get_hosts().iter().any(is_list) {
            "host= names one host; give several as postgres://HOST,HOST/DATABASE".to_owned()
        } else if hosts == 0 {
            "it names no host; give postgres://USER@HOST/DATABASE".to_owned()
        } else if names > 0 && addresses > 0 && names != addresses {
            format!("its hosts ({names}) do not match hostaddr ({addresses}); give an address for each")
        } else if ports > 1 && ports != hosts {
            format!("its ports ({ports}) do not match its hosts ({hosts}); give one port, or one for each")
        } else {
            return Ok(());
        };
        Err(StoreError::Place { problem })
    }

    /// Its hosts, the one to be preferred first.
    pub(super) fn hosts(&self) -> Vec<Host> {
        let (names, addresses, ports) = (self.config.get_hosts(), self.config.get_hostaddrs(), self.config.get_ports());
        let host = |n: usize| {
            let address = addresses.get(n).copied();
            let name = match names.get(n) {
                Some(Named::Tcp(name)) => name.clone(),
                Some(Named::Unix(path)) => path.display().to_string(),
                None => address.map(|address| address.to_string()).unwrap_or_default(),
            };
            Host { name, address, port: ports.get(n).or(ports.first()).copied().unwrap_or(5432) }
        };
        (0..names.len().max(addresses.len())).map(host).collect()
    }

    /// How long one host may take.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.config.get_connect_timeout().copied().unwrap_or(CONNECT)
    }

    /// A statement with the schema's name in it.
    pub(super) fn text(&self, text: &str) -> String {
        text.replace("{schema}", &self.schema)
    }
}

fn schema(value: &str) -> Result<String, StoreError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins = value.starts_with(|c: char| c.is_ascii_lowercase() || c == '_') && !value.starts_with("pg_");
    if !begins || !value.chars().all(plain) || value.len() > SCHEMA_BYTES_MAX {
        let problem = format!(
            "schema is {value:?}; give up to {SCHEMA_BYTES_MAX} lower-case letters, digits and _, no digit first"
        );
        return Err(StoreError::Place { problem });
    }
    Ok(value.to_owned())
}

/// True for a setting that asks for what is done anyway.
fn is_settled(name: &str, value: &str) -> Result<bool, StoreError> {
    let Some((_, same, why)) = SETTLED.iter().find(|(settled, ..)| *settled == name) else {
        return if name.starts_with("ssl") {
            Err(StoreError::Place { problem: format!("{name} is given, but nothing is done about it; leave it out") })
        } else {
            Ok(false)
        };
    };
    if same.contains(&value) {
        return Ok(true);
    }
    let same = same.join(" or ");
    Err(StoreError::Place { problem: format!("{name} is {value:?}, but {why}; give {same}, or leave it out") })
}

fn between<T>(name: &str, value: &str, range: RangeInclusive<T>) -> Result<T, StoreError>
where
    T: FromStr + PartialOrd + fmt::Display,
{
    let problem = || format!("{name} is {value:?}; give {} to {}", range.start(), range.end());
    value.parse().ok().filter(|n| range.contains(n)).ok_or_else(|| StoreError::Place { problem: problem() })
}

fn nonzero<T: Default + PartialEq>(n: T) -> Option<T> {
    (n != T::default()).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_may_name_several_hosts_and_our_own_settings() {
        let url = "postgres://u:secret@a:5433,b:5434/db?schema=orders&prepared=off&committers=3&connect_timeout=2";
        let place = Place::parse(url).expect("it is well formed");
        let host = |name: &str, port| Host { name: name.to_owned(), address: None, port };
        assert_eq!(place.hosts(), [host("a", 5433), host("b", 5434)]);
        assert_eq!((place.schema.as_str(), place.prepared, place.committers), ("orders", Prepared::Off, 3));
        assert_eq!(place.connect_timeout(), Duration::from_secs(2));
        assert_eq!(format!("{place:?}"), "postgres://a:5433,b:5434/db?schema=orders", "and never shows a password");
    }

    #[test]
    fn an_address_spares_the_look_for_a_name() {
        let hosts = |url: &str| Place::parse(url).expect("it is well formed").hosts();
        let host = |name: &str, address: &str, port| Host {
            name: name.to_owned(),
            address: Some(address.parse().expect("an address")),
            port,
        };
        let two = hosts("postgres://a:5433,b:5434/db?hostaddr=10.0.0.1,::1");
        assert_eq!(two, [host("a", "10.0.0.1", 5433), host("b", "::1", 5434)]);
        let nameless = hosts("postgres:///db?hostaddr=10.0.0.1,10.0.0.2&port=6000");
        assert_eq!(nameless, [host("10.0.0.1", "10.0.0.1", 6000), host("10.0.0.2", "10.0.0.2", 6000)]);
    }

    /// They were read, and then nothing came of them.
    #[test]
    fn how_a_dead_peer_is_noticed_can_be_set() {
        let keepalive =
            |query: &str| Place::parse(&format!("postgres://h/db?{query}")).expect("it is well formed").keepalive;
        assert_eq!(keepalive("connect_timeout=2"), Keepalive::default());
        assert_eq!(
            keepalive("keepalives=0&keepalives_idle=60&keepalives_interval=0&keepalives_count=9&tcp_user_timeout=2500"),
            Keepalive {
                asks: false,
                idle: Some(Duration::from_secs(60)),
                interval: None,
                count: Some(9),
                unanswered: Some(Duration::from_millis(2_500)),
            }
        );
    }

    #[test]
    fn what_asks_for_what_is_done_anyway_is_taken() {
        for (name, values, _) in SETTLED {
            for value in values {
                Place::parse(&format!("postgres://h/db?{name}={value}")).expect("it is taken");
            }
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_a_remedy() {
        let problem = |url: &str| Place::parse(url).expect_err("it is refused").to_string();
        insta::assert_snapshot!(
            [
                "postgres://h/db?schema=Orders",
                "postgres://h/db?schema=pg_x",
                "postgres://h/db?prepared=maybe",
                "postgres://h/db?committers=0",
                "postgres://h/db?partitions=1",
                "postgres://h:port/db",
                "postgres:///db",
                "postgres://h/db?colour=red",
                "postgres://a,b/db?hostaddr=10.0.0.1",
                "postgres://h/db?hostaddr=elsewhere",
                "postgres://h/db?port=6000",
                "postgres:///db?host=a,b",
                "postgres://h/db?keepalives=yes",
                "postgres://h/db?keepalives_idle=-1",
                "postgres://h/db?keepalives_count=1000",
                "postgres://h/db?tcp_user_timeout=15s",
                "postgres://h/db?target_session_attrs=read-only",
                "postgres://h/db?load_balance_hosts=random",
                "postgres://h/db?channel_binding=maybe",
                "postgres://h/db?sslmode=verify",
                "postgres://h/db?sslmode=verify-full",
                "postgres://h/db?sslmode=require&sslrootcert=system",
                "postgres://h/db?sslrootcert=/nowhere/root.crt",
                "postgres://h/db?sslmode=verify-full&sslrootcert=",
                "postgres://h/db?sslmode=verify-full&sslrootcert=%2Fnowhere%2Froot.crt",
                "postgres://h/db?sslcert=/nowhere/own.crt",
                "postgres://h/db?sslkey=/nowhere/own.key",
                "postgres://h/db?sslmode=disable&sslcert=/nowhere/own.crt&sslkey=/nowhere/own.key",
                "postgres://h/db?sslmode=verify-full&sslmode=require",
                "postgres://h/db?ssl=true&sslmode=prefer",
                "postgres://h/db?sslcrl=/nowhere/crl",
                "postgres://h/db?ssl_min_protocol_version=TLSv1.3",
                "postgres://h/db?sslnegotiation=direct",
            ]
            .map(problem)
            .join("\n")
        );
    }
}
