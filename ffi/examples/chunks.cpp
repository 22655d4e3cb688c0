// TPC-H's queries 1, 3, 6 and 12 over a column store in chunks (chunks.hpp): in RAM, in far memory, and while a plug-in
// migrates what is read most.
//
//   chunks [--scale 0.1] [--far far_limit:8MiB,capacity:4GiB] [--ram 6MiB] [--tier NAME=ROOM:CONFIG]...
//
// --far configures the far heap, --ram is what the plug-in may put into RAM, and each --tier adds one between both.
// Rows follow clause 4.2.3 of TPC-H, with a generator of this program's own; answers are compared with those of loops
// over the rows as they were made.
#include "chunks.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>

namespace {

using namespace chunks;
using number = std::int32_t;
using word = std::string_view;
using sums = std::array<std::int64_t, 4>;
using answer = std::map<std::string, sums>;

// Days since 1992-01-01.
constexpr number first_1994 = 731, first_1995 = 1'096, march_1995 = 1'169, june_1995 = 1'263, query1_ends = 2'436,
                 last_order = 2'405;
constexpr std::size_t chunk_rows = 65'536;

struct customer {
    number key;
    word segment;
};
struct order {
    number key, customer, date;
    word priority;
};
struct line {
    number order, quantity, discount, tax, shipped, committed, received;
    std::int64_t price; // Cents.
    word returned, status, mode;
};
struct rows {
    std::vector<customer> customers;
    std::vector<order> orders;
    std::vector<line> lines;
};

// Columns, in the order of the fields.
struct of_customer { enum { key, segment }; };
struct of_order { enum { key, customer, date, priority }; };
struct of_line { enum { order, quantity, discount, tax, shipped, committed, received, price, returned, status, mode }; };

rows generate(double scale) {
    const word segments[] = {"AUTOMOBILE", "BUILDING", "FURNITURE", "HOUSEHOLD", "MACHINERY"};
    const word priorities[] = {"1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW"};
    const word modes[] = {"AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK"};
    const auto of_scale = [&](number count) { return std::max(static_cast<number>(scale * count), 10); };
    const number customers = of_scale(150'000), parts = of_scale(200'000);
    std::uint64_t state = 42;
    const auto between = [&](number from, number to) {
        state = state * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
        return from + static_cast<number>((state >> 33) % static_cast<std::uint64_t>(to - from + 1));
    };
    rows made;
    for (number key = 1; key <= customers; key++) made.customers.push_back({key, segments[between(0, 4)]});
    for (number key = 1; key <= 10 * customers; key++) {
        number by = between(1, customers);
        while (by % 3 == 0) by = between(1, customers); // A third of the customers has no orders.
        const number date = between(0, last_order);
        made.orders.push_back({key, by, date, priorities[between(0, 4)]});
        for (number left = between(1, 7); left > 0; left--) {
            line next{};
            next.order = key;
            next.quantity = between(1, 50);
            next.discount = between(0, 10);
            next.tax = between(0, 8);
            next.shipped = date + between(1, 121);
            next.committed = date + between(30, 90);
            next.received = next.shipped + between(1, 30);
            const number part = between(1, parts);
            next.price = next.quantity * (90'000 + (part / 10) % 20'001 + 100 * (part % 1'000));
            next.returned = next.received > june_1995 ? "N" : between(0, 1) ? "A" : "R";
            next.status = next.shipped > june_1995 ? "O" : "F";
            next.mode = modes[between(0, 6)];
            made.lines.push_back(next);
        }
    }
    return made;
}

// A table with a column for each field.
template <class Row, class... Field> table table_of(const std::vector<Row> &all, resource *in, Field Row::*...fields) {
    table made;
    for (std::size_t from = 0; from < all.size(); from += chunk_rows) {
        const std::size_t to = std::min(from + chunk_rows, all.size());
        const auto column = [&](auto field) {
            std::vector<std::decay_t<decltype(all[0].*field)>> values;
            for (std::size_t row = from; row < to; row++) values.push_back(all[row].*field);
            made.back().add(values, in);
        };
        made.emplace_back();
        (column(fields), ...);
    }
    return made;
}

bool is_in_query6(number shipped, number discount, number quantity) {
    return shipped >= first_1994 && shipped < first_1995 && discount >= 5 && discount <= 7 && quantity < 24;
}
bool is_in_query12(number shipped, number committed, number received) {
    return received >= first_1994 && received < first_1995 && committed < received && shipped < committed;
}
bool is_urgent(word priority) { return priority == "1-URGENT" || priority == "2-HIGH"; }

void add_to_query1(sums &to, std::int64_t quantity, std::int64_t price, std::int64_t discount, std::int64_t tax) {
    to[0] += quantity;
    to[1] += price;
    to[2] += price * (100 - discount);
    to[3] += price * (100 - discount) * (100 + tax);
}

// Orders by what they are worth: -revenue, date, key.
using ranking = std::set<std::array<std::int64_t, 3>>;

answer ten_best(const ranking &all) {
    answer best;
    for (const auto &[revenue, date, key] : all) {
        if (best.size() == 10) break;
        best[std::to_string(best.size())] = {-revenue, date, key, 0};
    }
    return best;
}

// Sums by flag and status.
answer query1(const database &db) {
    answer all;
    for (const chunk &part : db.at("lineitem")) {
        const auto shipped = part.values<number>(of_line::shipped), quantity = part.values<number>(of_line::quantity),
                   discount = part.values<number>(of_line::discount), tax = part.values<number>(of_line::tax);
        const auto price = part.values<std::int64_t>(of_line::price);
        const auto returned = part.words(of_line::returned), status = part.words(of_line::status);
        std::array<std::array<sums, 2>, 3> groups{}; // By codes: three flags, two states.
        for (std::size_t row = 0; row < part.rows(); row++) {
            if ((*shipped)[row] > query1_ends) continue;
            sums &group = groups[returned->code(row)][status->code(row)];
            add_to_query1(group, (*quantity)[row], (*price)[row], (*discount)[row], (*tax)[row]);
        }
        for (std::uint8_t group = 0; group < 6; group++) {
            const std::uint8_t flag = group / 2, state = group % 2;
            if (groups[flag][state][0] == 0) continue;
            sums &to = all[std::string(returned->word(flag)) + std::string(status->word(state))];
            for (std::size_t i = 0; i < to.size(); i++) to[i] += groups[flag][state][i];
        }
    }
    return all;
}

// The ten open orders of a market segment that are worth most: customers, orders and lines, joined by hash tables that
// go at once.
answer query3(const database &db) {
    farheap::bump_resource scratch(FARHEAP_LOCAL);
    std::pmr::unordered_map<number, bool> builders(&scratch);
    for (const chunk &part : db.at("customer")) {
        const auto key = part.values<number>(of_customer::key);
        const auto segment = part.words(of_customer::segment);
        const int wanted = segment->code_of("BUILDING");
        for (std::size_t row = 0; row < part.rows(); row++) {
            if (segment->code(row) == wanted) builders[(*key)[row]] = true;
        }
    }
    std::pmr::unordered_map<number, std::array<std::int64_t, 2>> orders(&scratch); // Revenue, date.
    for (const chunk &part : db.at("orders")) {
        const auto key = part.values<number>(of_order::key), by = part.values<number>(of_order::customer),
                   date = part.values<number>(of_order::date);
        for (std::size_t row = 0; row < part.rows(); row++) {
            if ((*date)[row] < march_1995 && builders.count((*by)[row])) orders[(*key)[row]] = {0, (*date)[row]};
        }
    }
    for (const chunk &part : db.at("lineitem")) {
        const auto shipped = part.values<number>(of_line::shipped), key = part.values<number>(of_line::order),
                   discount = part.values<number>(of_line::discount);
        const auto price = part.values<std::int64_t>(of_line::price);
        for (std::size_t row = 0; row < part.rows(); row++) {
            if ((*shipped)[row] <= march_1995) continue;
            const auto at = orders.find((*key)[row]);
            if (at != orders.end()) at->second[0] += (*price)[row] * (100 - (*discount)[row]);
        }
    }
    ranking all;
    for (const auto &[key, found] : orders) {
        if (found[0] > 0) all.insert({-found[0], found[1], key});
    }
    return ten_best(all);
}

answer query6(const database &db) {
    std::int64_t revenue = 0;
    for (const chunk &part : db.at("lineitem")) {
        const auto shipped = part.values<number>(of_line::shipped), quantity = part.values<number>(of_line::quantity),
                   discount = part.values<number>(of_line::discount);
        const auto price = part.values<std::int64_t>(of_line::price);
        for (std::size_t row = 0; row < part.rows(); row++) {
            if (is_in_query6((*shipped)[row], (*discount)[row], (*quantity)[row])) {
                revenue += (*price)[row] * (*discount)[row];
            }
        }
    }
    return {{"revenue", {revenue}}};
}

// Late lines by mail and ship, of urgent orders and of others: lines joined with orders.
answer query12(const database &db) {
    farheap::bump_resource scratch(FARHEAP_LOCAL);
    std::pmr::unordered_map<number, bool> urgent(&scratch);
    for (const chunk &part : db.at("orders")) {
        const auto key = part.values<number>(of_order::key);
        const auto priority = part.words(of_order::priority);
        for (std::size_t row = 0; row < part.rows(); row++) {
            urgent[(*key)[row]] = is_urgent(priority->word(priority->code(row)));
        }
    }
    answer counts;
    for (const chunk &part : db.at("lineitem")) {
        const auto shipped = part.values<number>(of_line::shipped), received = part.values<number>(of_line::received),
                   committed = part.values<number>(of_line::committed), key = part.values<number>(of_line::order);
        const auto mode = part.words(of_line::mode);
        const int mail = mode->code_of("MAIL"), ship = mode->code_of("SHIP");
        for (std::size_t row = 0; row < part.rows(); row++) {
            const int by = mode->code(row);
            if ((by == mail || by == ship) && is_in_query12((*shipped)[row], (*committed)[row], (*received)[row])) {
                counts[by == mail ? "MAIL" : "SHIP"][urgent.at((*key)[row]) ? 0 : 1]++;
            }
        }
    }
    return counts;
}

struct query {
    const char *name;
    answer (*run)(const database &);
    answer expected;
};

// The answers by loops over rows. Keys are the rows' numbers, from 1.
std::vector<query> queries_on(const rows &all) {
    answer one, six{{"revenue", {}}}, twelve;
    std::map<number, sums> revenues;
    for (const line &made : all.lines) {
        const order &of = all.orders[made.order - 1];
        if (made.shipped <= query1_ends) {
            sums &group = one[std::string(made.returned) + std::string(made.status)];
            add_to_query1(group, made.quantity, made.price, made.discount, made.tax);
        }
        if (is_in_query6(made.shipped, made.discount, made.quantity)) six["revenue"][0] += made.price * made.discount;
        if ((made.mode == "MAIL" || made.mode == "SHIP") && is_in_query12(made.shipped, made.committed, made.received)) {
            twelve[std::string(made.mode)][is_urgent(of.priority) ? 0 : 1]++;
        }
        const bool is_builder = all.customers[of.customer - 1].segment == "BUILDING";
        if (is_builder && of.date < march_1995 && made.shipped > march_1995) {
            revenues[of.key][0] += made.price * (100 - made.discount);
        }
    }
    ranking best;
    for (const auto &[key, found] : revenues) best.insert({-found[0], all.orders[key - 1].date, key});
    return {{"1", query1, one}, {"3", query3, ten_best(best)}, {"6", query6, six}, {"12", query12, twelve}};
}

using seconds = std::chrono::duration<double>;

// Runs all queries; their times, or nothing when an answer is wrong.
std::optional<std::vector<double>> run(const database &db, const std::vector<query> &queries) {
    std::vector<double> times;
    for (const query &one : queries) {
        const auto began = std::chrono::steady_clock::now();
        const bool right = one.run(db) == one.expected;
        times.push_back(seconds(std::chrono::steady_clock::now() - began).count());
        if (right) continue;
        std::printf("query %s gave a wrong answer\n", one.name);
        return std::nullopt;
    }
    return times;
}

std::size_t bytes_in(const database &db, const resource *in) {
    std::size_t bytes = 0;
    for (slot *one : all_slots(db)) bytes += one->peek()->in() == in ? one->peek()->bytes() : 0;
    return bytes;
}

int work(double scale, const farheap::heap &heap, const std::vector<tier> &tiers) {
    resource *const ram = tiers.front().in, *const far = tiers.back().in;
    const rows made = generate(scale);
    const std::vector<query> queries = queries_on(made);
    database db;
    db["customer"] = table_of(made.customers, ram, &customer::key, &customer::segment);
    db["orders"] = table_of(made.orders, ram, &order::key, &order::customer, &order::date, &order::priority);
    db["lineitem"] =
        table_of(made.lines, ram, &line::order, &line::quantity, &line::discount, &line::tax, &line::shipped,
                 &line::committed, &line::received, &line::price, &line::returned, &line::status, &line::mode);
    const auto in_ram = run(db, queries);

    const auto began = std::chrono::steady_clock::now();
    for (slot *one : all_slots(db)) one->migrate(far);
    const seconds took = std::chrono::steady_clock::now() - began;
    const auto bytes = static_cast<double>(bytes_in(db, far));
    const auto metadata = static_cast<double>(heap.usage().metadata_bytes);
    const auto in_far = run(db, queries);
    if (!in_ram || !in_far || bytes_in(db, ram) > 0) return 1;

    // Two clients; what they read most is migrated meanwhile.
    tiering_plugin plugin(db, tiers, std::chrono::milliseconds(20));
    plugin.start();
    std::atomic<bool> are_right{true};
    const auto client = [&] {
        for (int pass = 0; pass < 3; pass++) are_right = run(db, queries) && are_right;
    };
    std::thread other(client);
    client();
    other.join();
    plugin.stop();
    const auto tiered = run(db, queries);
    if (!are_right || !tiered) return 1;

    std::printf("%.1f MiB of segments; to the far tier at %.0f MiB/s; metadata takes %.2f %%\n", bytes / (1 << 20),
                bytes / (1 << 20) / took.count(), 100.0 * metadata / bytes);
    std::printf("query,ram_s,far_s,tiered_s\n");
    for (std::size_t i = 0; i < queries.size(); i++) {
        std::printf("%s,%.4f,%.4f,%.4f\n", queries[i].name, (*in_ram)[i], (*in_far)[i], (*tiered)[i]);
    }
    bool fits = true;
    for (const tier &one : tiers) {
        const std::size_t in = bytes_in(db, one.in);
        fits = fits && in <= one.room;
        std::printf("%s: %zu KiB\n", one.name.c_str(), in >> 10);
    }
    std::printf("%zu migrations by the plug-in\n", static_cast<std::size_t>(plugin.migrated()));
    return fits && plugin.migrated() > 0 ? 0 : 1;
}

std::size_t size(const std::string &text) {
    char *unit = nullptr;
    const std::size_t count = std::strtoull(text.c_str(), &unit, 10);
    return word(unit) == "GiB" ? count << 30 : word(unit) == "MiB" ? count << 20 : count;
}

int start(int count, char **arguments) {
    std::map<std::string, std::string> flags{
        {"--scale", "0.1"}, {"--far", "far_limit:8MiB,capacity:4GiB"}, {"--ram", "6MiB"}};
    std::vector<std::array<std::string, 3>> between; // Name, room, configuration.
    bool is_usage_right = count % 2 == 1;
    for (int at = 1; is_usage_right && at < count; at += 2) {
        const std::string flag = arguments[at], value = arguments[at + 1];
        const std::size_t is = value.find('='), colon = value.find(':');
        if (flag == "--tier" && is < colon && colon < value.size()) {
            between.push_back({value.substr(0, is), value.substr(is + 1, colon - is - 1), value.substr(colon + 1)});
        } else if (flags.count(flag)) {
            flags[flag] = value;
        } else {
            is_usage_right = false;
        }
    }
    if (!is_usage_right) {
        std::fprintf(stderr, "chunks [--scale 0.1] [--far CONFIG] [--ram 6MiB] [--tier NAME=ROOM:CONFIG]...\n");
        return 2;
    }
    farheap::heap heap(flags["--far"]);
    farheap::local_resource ram;
    farheap::far_resource far;
    std::vector<farheap::heap> heaps;
    std::vector<std::unique_ptr<farheap::tier_resource>> added;
    std::vector<tier> tiers{{"ram", &ram, size(flags["--ram"])}};
    for (const auto &[name, room, config] : between) {
        heaps.push_back(heap.add_tier(name.c_str(), config.c_str()));
        added.push_back(std::make_unique<farheap::tier_resource>(heaps.back().placement()));
        tiers.push_back({name, added.back().get(), size(room)});
    }
    tiers.push_back({"far", &far, SIZE_MAX});
    const int status = work(std::strtod(flags["--scale"].c_str(), nullptr), heap, tiers);
    for (farheap::heap &one : heaps) one.shutdown();
    heap.shutdown();
    return status;
}

} // namespace

int main(int count, char **arguments) {
    try {
        return start(count, arguments);
    } catch (const farheap::error &error) {
        const bool forbidden = error.code() == FARHEAP_E_UFFD_UNAVAILABLE;
        std::printf("%s%s\n", forbidden ? "skipped: " : "", error.what());
        return forbidden ? 77 : 1;
    } catch (const std::exception &error) { // farheap::bad_alloc is one.
        std::printf("%s\n", error.what());
        return 1;
    }
}
